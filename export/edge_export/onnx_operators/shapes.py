"""Operators that move elements and compute nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from edge_export.translator import OperatorError, Translator, Value, dtype_of, same_sizes, sizes_of

aten = torch.ops.aten
END = (1 << 63) - 1


def view(t: Translator, node: fx.Node, x: fx.Node, *_: Any) -> str:
    """Another shape for the same elements in the same order."""
    name = t.name(x)
    return name if same_sizes(sizes_of(x), sizes_of(node)) else t.reshaped(name, sizes_of(node))


def expand(t: Translator, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> str:
    """Repetition along axes of extent 1; see ``elementwise.narrow`` for where it is not needed."""
    if same_sizes(sizes_of(x), sizes_of(node)):
        return t.name(x)
    return t.graph("Expand", t.name(x), t.exact_shape(sizes_of(node)))


def copy(t: Translator, node: fx.Node, _: fx.Node, source: fx.Node, *__: Any) -> str:
    """What an assignment in place leaves behind: the source, in the shape and dtype of the target."""
    name = t.name(source, dtype_of(node))
    if same_sizes(sizes_of(source), sizes_of(node)):
        return name
    return t.graph("Expand", name, t.exact_shape(sizes_of(node)))


def permute(t: Translator, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> str:
    """Two in a row are one, or none; one that moves only axes of extent 1 is a reshape."""
    name, sizes = t.name(x), sizes_of(x)
    order = [dim % len(dims) for dim in dims]
    producer = t.graph.producer(name)
    if producer is not None and producer.op_type == "Transpose":
        before = list(producer.attribute[0].ints)
        name, order = producer.input[0], [before[dim] for dim in order]
        if order == sorted(order):
            return str(name)
        sizes = [sizes[before.index(axis)] for axis in range(len(sizes))]
    blocks, moves = _blocks(sizes, order)
    if moves == sorted(moves):
        return t.reshaped(name, sizes_of(node))
    in_blocks = _moves_one(moves) or moves[-1] == len(moves) - 1
    if in_blocks and len(moves) == len(order):
        return t.graph("Transpose", name, perm=order)
    # As few axes as possible: ONNX Runtime would make one of this and another behind some sum.
    name = t.reshaped(name, blocks)
    moved = t.graph("Transpose", name, perm=moves) if in_blocks else _in_two(t, name, blocks, moves)
    return t.reshaped(moved, sizes_of(node))


def _blocks(sizes: list[int | torch.SymInt], order: list[int]) -> tuple[list[int | torch.SymInt], list[int]]:
    """Sizes and order where axes that stay side by side are one, and axes of extent 1 none."""
    real = [axis for axis in range(len(sizes)) if not same_sizes([sizes[axis]], [1])]
    runs: list[list[int]] = []
    for axis in (real.index(axis) for axis in order if axis in real):
        if runs and axis == runs[-1][-1] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    before = sorted(runs)
    return [math.prod(sizes[real[axis]] for axis in run) for run in before], [before.index(r) for r in runs]


def _moves_one(order: list[int]) -> bool:
    """Whether ONNX Runtime moves an axis as a whole; it goes number by number otherwise, ten times slower."""
    return any((rest := [axis for axis in order if axis != moved]) == sorted(rest) for moved in order)


def _in_two(t: Translator, name: str, sizes: list[int | torch.SymInt], order: list[int]) -> str:
    """First all but the innermost axis, in blocks of that; then the innermost, to where it belongs."""
    innermost = len(order) - 1
    outer = [axis for axis in order if axis != innermost]
    above = order.index(innermost)
    name = t.graph("Transpose", name, perm=[*outer, innermost])
    # Other axes in between, or ONNX Runtime makes one of the two.
    merged = [math.prod(sizes[axis] for axis in axes) for axes in (outer[:above], outer[above:])]
    name = t.reshaped(name, [*merged, sizes[innermost]])
    return t.graph("Transpose", name, perm=[0, 2, 1])


def slice_axis(
    t: Translator,
    node: fx.Node,
    x: fx.Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> str:
    """Elements ``start`` to ``end`` along an axis."""
    if same_sizes(sizes_of(x), sizes_of(node)):
        return t.name(x)
    bounds = [0 if start is None else start, END if end is None else end]
    if not all(isinstance(bound, int) for bound in bounds):
        raise OperatorError("aten.slice by the size of the batch")
    ints = t.graph.integers
    return t.graph("Slice", t.name(x), ints(bounds[0]), ints(bounds[1]), ints(dim), ints(step))


def select(t: Translator, _: fx.Node, x: fx.Node, dim: int, index: int) -> str:
    """One element along an axis, which goes."""
    return t.graph("Gather", t.name(x), t.name(index, torch.int64), axis=dim)


def take(t: Translator, _: fx.Node, x: fx.Node, dim: int, indices: fx.Node) -> str:
    """Those along an axis that a list names."""
    return t.graph("Gather", t.name(x), t.name(indices), axis=dim)


def concatenate(t: Translator, node: fx.Node, tensors: Sequence[Value], dim: int = 0) -> str:
    """One after the other along an axis."""
    names = [t.name(tensor, dtype_of(node)) for tensor in tensors]
    return names[0] if len(names) == 1 else t.graph("Concat", *names, axis=dim)


def pad(t: Translator, node: fx.Node, x: fx.Node, widths: Sequence[int], value: float = 0.0) -> str:
    """PyTorch gives widths by pairs from the last axis on; ONNX, all starts and then all ends."""
    if not any(widths):
        return t.name(x)
    missing = len(sizes_of(x)) - len(widths) // 2
    before = [0] * missing + list(widths[-2::-2])
    after = [0] * missing + list(widths[::-2])
    filler = t.name(float(value) if dtype_of(node).is_floating_point else int(value), dtype_of(node))
    return t.graph("Pad", t.name(x), t.graph.integers(*before, *after), filler)


def flip(t: Translator, _: fx.Node, x: fx.Node, dims: Sequence[int]) -> str:
    """Slices that go backwards."""
    ints = t.graph.integers
    count = len(dims)
    return t.graph(
        "Slice", t.name(x), ints(*[-1] * count), ints(*[-END] * count), ints(*dims), ints(*[-1] * count)
    )


def embedding(t: Translator, _: fx.Node, weight: fx.Node, indices: fx.Node, *__: Any) -> str:
    """Rows of a table."""
    return t.graph("Gather", t.name(weight), t.name(indices), axis=0)


def index(t: Translator, _: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> str:
    """One index along each of the last axes, none along those before: the elements of a fixed pattern."""
    given = [i for i, tensor in enumerate(indices) if tensor is not None]
    axes = list(range(len(sizes_of(x))))
    if len(given) == 1:
        return t.graph("Gather", t.name(x), t.name(indices[given[0]]), axis=given[0])  # type: ignore[arg-type]
    if given != axes[given[0] :] or given[0] == 0 or not all(t.is_constant(indices[i]) for i in given):
        raise OperatorError("aten.index by several tensors")
    sizes = [int(sizes_of(x)[i]) for i in given]
    flat = torch.zeros((), dtype=torch.int64)
    for i, size in zip(given, sizes, strict=True):
        flat = flat * size + t.constant_tensor(indices[i]) % size
    leading = sizes_of(x)[: given[0]]
    rows = t.reshaped(t.name(x), [*leading, int(torch.tensor(sizes).prod())])
    return t.graph("Gather", rows, t.graph.constant(flat), axis=given[0])


TABLE: dict[Any, Callable[..., Any]] = {
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.reshape.default: view,
    aten.unsqueeze.default: view,
    aten.squeeze.dim: view,
    aten.squeeze.dims: view,
    aten.squeeze.default: view,
    aten.expand.default: expand,
    aten.expand_copy.default: expand,
    aten.copy.default: copy,
    aten.permute.default: permute,
    aten.permute_copy.default: permute,
    aten.slice.Tensor: slice_axis,
    aten.select.int: select,
    aten.index_select.default: take,
    aten.cat.default: concatenate,
    aten.constant_pad_nd.default: pad,
    aten.flip.default: flip,
    aten.embedding.default: embedding,
    aten.index.Tensor: index,
}
