"""What PyTorch's operators do to tensors that are turned or repeated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from edge_export.layouts.values import (
    Repeated,
    Rule,
    Turned,
    Value,
    all_settled,
    count,
    dtype_of,
    is_value,
    repeated,
    settled,
    turned,
)
from edge_export.layouts.views import view

aten = torch.ops.aten


def pointwise(target: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Element by element: what is repeated alone stays so, and what is turned as most tensors are."""
    if any(is_value(value) for value in kwargs.values()):
        result: Tensor = target(*all_settled(args), **all_settled(kwargs))
        return result
    given = [value for value in args if is_value(value)]
    if len(given) == 1 and isinstance(given[0], Repeated):
        once = tuple(value.value if isinstance(value, Repeated) else value for value in args)
        return repeated(pointwise(target, once, kwargs), given[0].shape)
    whole = [tuple(value.shape) for value in given if not isinstance(value, Repeated)]
    args = tuple(_broadcast(value, whole) if isinstance(value, Repeated) else value for value in args)
    return _as_most_lie(target, args, kwargs)


def _broadcast(value: Repeated, whole: list[tuple[int, ...]]) -> Value:
    """Once, if another operand is as large as the result and lets the operator repeat it."""
    return value.value if value.shape in whole else settled(value)


def _as_most_lie(target: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """Turned as leaves least to move; where that is even, on the numbers in order."""
    tensors = [value for value in args if is_value(value)]
    rank = max(len(value.shape) for value in tensors)
    orders = [tuple(range(rank))]
    orders += [value.axes for value in tensors if isinstance(value, Turned) and len(value.axes) == rank]

    def laid(value: Any, axes: tuple[int, ...]) -> Any:
        if not is_value(value) or not value.shape:
            return value
        if len(value.shape) < rank:
            value = view(value, [1] * (rank - len(value.shape)) + list(value.shape))
        return turned(value, sorted(range(rank), key=lambda axis: axes[axis]))

    def moved(axes: tuple[int, ...]) -> int:
        return sum(
            count(value.shape) for value in (laid(v, axes) for v in tensors) if isinstance(value, Turned)
        )

    best = min(orders, key=moved)
    return turned(target(*(all_settled(laid(value, best)) for value in args), **kwargs), best)


def _reduce(target: OpOverload[..., Any]) -> Callable[..., Value]:
    def reduce(value: Value, dims: Sequence[int], keepdim: bool = False, **options: Any) -> Value:
        if not isinstance(value, Turned):
            value = Turned(settled(value), tuple(range(len(value.shape))))
        rank = len(value.axes)
        gone = {dim % rank for dim in dims} or set(range(rank))
        result = target(value.base, sorted(value.axes[axis] for axis in gone), keepdim, **options)
        if keepdim:
            return turned(result, value.axes)
        left = [value.axes[axis] for axis in range(rank) if axis not in gone]
        return turned(result, [sorted(left).index(axis) for axis in left])

    return reduce


def _multiply(a: Value, b: Value) -> Value:
    """``a @ b``, or the transpose of bᵀ @ aᵀ: whichever leaves less to turn."""
    across = count((a.shape[0], b.shape[1])) + sum(
        count(x.shape) for x in (a, b) if not isinstance(x, Turned)
    )
    if sum(count(x.shape) for x in (a, b) if isinstance(x, Turned)) <= across:
        product: Tensor = aten.mm.default(settled(a), settled(b))
        return product
    return turned(aten.mm.default(settled(turned(b, (1, 0))), settled(turned(a, (1, 0)))), (1, 0))


def _permute(value: Value, axes: Sequence[int]) -> Value:
    return turned(value, [axis % len(axes) for axis in axes])


def _transpose(value: Value, first: int, second: int) -> Value:
    axes = list(range(len(value.shape)))
    axes[first], axes[second] = axes[second], axes[first]
    return turned(value, axes)


def _as_it_is(value: Value, **_: Any) -> Value:
    return value


def _copy(into: Value, value: Value, **_: Any) -> Value:
    """What an activation in place leaves behind: the second, where nothing is converted."""
    if into.shape == value.shape and dtype_of(into) == dtype_of(value):
        return value
    result: Tensor = aten.copy.default(settled(into), settled(value))
    return result


def _written(
    into: Value, value: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """What an assignment to a slice leaves behind, as the gradient of a slice does."""
    if step == 1 and start in (None, 0) and end in (None, sys.maxsize):
        return value
    x, source, size = settled(into), settled(value), into.shape[dim]
    if isinstance(size, torch.SymInt):
        result: Tensor = aten.slice_scatter.default(x, source, dim, start, end, step)
        return result
    written = slice(start, end, step).indices(size)
    if step == 1:
        first, last, _ = written
        parts = (x.narrow(dim, 0, first), source, x.narrow(dim, last, size - last))
        return torch.cat([part for part in parts if part.shape[dim]], dim)
    taken = list(range(size))
    for number, position in enumerate(range(*written)):
        taken[position] = size + number
    return torch.cat([x, source], dim).index_select(dim, torch.tensor(taken, device=x.device))


def _squeeze(value: Value, dims: int | Sequence[int]) -> Value:
    gone = {dim % len(value.shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    return view(value, [n for axis, n in enumerate(value.shape) if n != 1 or axis not in gone])


def _unsqueeze(value: Value, dim: int) -> Value:
    shape = list(value.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return view(value, shape)


RULES: dict[Any, Rule] = {
    aten.permute.default: _permute,
    aten.permute_copy.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: lambda value: _transpose(value, 0, 1),
    aten.clone.default: _as_it_is,
    aten.alias.default: _as_it_is,
    aten.detach.default: _as_it_is,
    aten.lift_fresh_copy.default: _as_it_is,
    aten.copy.default: _copy,
    aten.slice_scatter.default: _written,
    aten.expand.default: lambda value, shape, **_: repeated(value, shape),
    aten._to_copy.default: lambda value, **options: pointwise(aten._to_copy.default, (value,), options),
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.mm.default: _multiply,
    aten.sym_size.int: lambda value, dim: value.shape[dim],
    **{target: _reduce(target) for target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)},
}
