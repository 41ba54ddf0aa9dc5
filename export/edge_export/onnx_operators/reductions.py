"""Operators that sum, average or search over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from edge_export.onnx_graph import onnx_type
from edge_export.translator import Translator, Value, dtype_of, same_sizes, sizes_of

aten = torch.ops.aten


def total(
    t: Translator,
    node: fx.Node,
    x: fx.Node,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> str:
    """A sum."""
    del dtype
    name = t.name(x, dtype_of(node))
    return _reduce(t, "ReduceSum", name, x, dims, keepdim)


def mean(
    t: Translator,
    node: fx.Node,
    x: fx.Node,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> str:
    """An average."""
    del dtype
    return _reduce(t, "ReduceMean", t.name(x, dtype_of(node)), x, dims, keepdim)


def extreme(op: str) -> Callable[..., str]:
    """The largest or smallest."""

    def translate(
        t: Translator, _: fx.Node, x: fx.Node, dims: Sequence[int] = (), keepdim: bool = False
    ) -> str:
        return _reduce(t, op, t.name(x), x, dims, keepdim)

    return translate


def any_of(t: Translator, _: fx.Node, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> str:
    """Whether one is true."""
    ones = t.graph("Cast", t.name(x, torch.bool), to=onnx_type(torch.int32))
    dims = None if dim is None else [dim]
    return t.graph("Cast", _reduce(t, "ReduceMax", ones, x, dims, keepdim), to=onnx_type(torch.bool))


def argmax(t: Translator, _: fx.Node, x: fx.Node, dim: int | None = None, keepdim: bool = False) -> str:
    """The first of the largest."""
    if dim is None:
        flat = t.graph("Reshape", t.name(x), t.graph.integers(-1))
        return t.graph("ArgMax", flat, axis=0, keepdims=0)
    return t.graph("ArgMax", t.name(x), axis=dim, keepdims=int(keepdim))


def softmax(op: str) -> Callable[..., str]:
    """Along one axis."""

    def translate(t: Translator, _: fx.Node, x: Value, dim: int, half_to_float: bool = False) -> str:
        del half_to_float
        return t.graph(op, t.name(x), axis=dim)

    return translate


def _reduce(t: Translator, op: str, name: str, x: fx.Node, dims: Sequence[int] | None, keepdim: bool) -> str:
    sizes = sizes_of(x)
    rank = len(sizes)
    over = sorted(dim % rank for dim in dims) if dims else list(range(rank))
    result = [1 if axis in over else size for axis, size in enumerate(sizes) if keepdim or axis not in over]
    long = [axis for axis in over if not same_sizes([sizes[axis]], [1])]
    if not long:
        return name if keepdim or not over else t.reshaped(name, result)
    if long == over:
        return t.graph(op, name, t.graph.integers(*over), keepdims=int(keepdim))
    return t.reshaped(t.graph(op, name, t.graph.integers(*long), keepdims=1), result)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.sum.default: total,
    aten.sum.dim_IntList: total,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.amax.default: extreme("ReduceMax"),
    aten.amin.default: extreme("ReduceMin"),
    aten.any.default: any_of,
    aten.any.dim: any_of,
    aten.argmax.default: argmax,
    aten._softmax.default: softmax("Softmax"),
    aten._log_softmax.default: softmax("LogSoftmax"),
}
