"""Permutations that wait until somebody needs the numbers in another order: most of them cancel out.

A convolution wants its maps with the batch innermost, a linear layer the transpose of its weight, and
autograd turns back what either has turned; as kernels each of these would be a pass over the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten


class Turned(NamedTuple):
    """A tensor that lies in memory as ``base`` and is ``base.permute(axes)``."""

    base: Tensor
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """As the graph sees it."""
        return tuple(self.base.shape[axis] for axis in self.axes)


Value: TypeAlias = Tensor | Turned


def without_permutations(graph: fx.GraphModule, examples: Sequence[Tensor]) -> fx.GraphModule:
    """The same function with the permutations that are left, each where its result is used."""
    interpreter = _Interpreter(graph)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in examples]
        traced = make_fx(lambda *tensors: interpreter.run(*tensors))(*fakes)
    traced.graph.eliminate_dead_code()
    return traced


class _Interpreter(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on tensors that may be turned."""
        if rule := _RULES.get(target):
            return rule(*args, **kwargs)
        if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
            return _pointwise(target, args, kwargs)
        return _COPYING.get(target, target)(*_settled(args), **_settled(kwargs))

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results, turned as they are to be."""
        return super().output(target, _settled(args), kwargs)


def settled(value: Value) -> Tensor:
    """The tensor with its numbers in the order of its axes."""
    if isinstance(value, Tensor):
        return value
    result: Tensor = aten.permute_copy.default(value.base, list(value.axes))
    return result


def _settled(values: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda value: settled(value) if isinstance(value, Turned) else value,
        values,
        is_leaf=lambda value: isinstance(value, Turned),
    )


def turned(value: Value, axes: Sequence[int]) -> Value:
    """``value.permute(axes)``; nothing is moved."""
    base, before = value if isinstance(value, Turned) else (value, tuple(range(value.dim())))
    composed = tuple(before[axis] for axis in axes)
    # An axis of 1 may be anywhere.
    moved = [axis for axis in composed if base.shape[axis] != 1]
    if moved != sorted(moved):
        return Turned(base, composed)
    shape = [base.shape[axis] for axis in composed]
    return base if shape == list(base.shape) else _viewed(base, shape)


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
    if into.shape == value.shape and _dtype(into) == _dtype(value):
        return value
    result: Tensor = aten.copy.default(settled(into), settled(value))
    return result


def _dtype(value: Value) -> torch.dtype:
    return value.dtype if isinstance(value, Tensor) else value.base.dtype


def _squeeze(value: Value, dims: int | Sequence[int]) -> Value:
    gone = {dim % len(value.shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    return _view(value, [n for axis, n in enumerate(value.shape) if n != 1 or axis not in gone])


def _unsqueeze(value: Value, dim: int) -> Value:
    shape = list(value.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return _view(value, shape)


def _view(value: Value, shape: Sequence[int]) -> Value:
    """Merge or split axes without moving anything, where what is merged lies side by side in memory."""
    if isinstance(value, Tensor):
        return _viewed(value, shape)
    groups = _groups(value.shape, shape)
    pieces: list[tuple[int, list[int]]] = []  # where it begins in memory, and its extents afterwards
    for old, new in groups:
        axes = [value.axes[axis] for axis in old if value.shape[axis] != 1]
        if axes and axes != list(range(axes[0], axes[0] + len(axes))):
            return _viewed(settled(value), shape)
        pieces.append((axes[0] if axes else -1, new))
    order = sorted(range(len(pieces)), key=lambda i: pieces[i][0])
    base = _viewed(value.base, [extent for i in order for extent in pieces[i][1]])
    starts, position = {}, 0
    for i in order:
        starts[i] = position
        position += len(pieces[i][1])
    return turned(base, [starts[i] + k for i, (_, new) in enumerate(pieces) for k in range(len(new))])


def _viewed(x: Tensor, shape: Sequence[int]) -> Tensor:
    result: Tensor = aten.view.default(x, shape)
    return result


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest parts of both shapes that hold as many elements: axes of the old, extents of the new."""
    known = math.prod(extent for extent in new if extent != -1)
    new = [extent if extent != -1 else math.prod(old) // known for extent in new]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        axes, extents, left, right = [], [], 1, 1
        while True:
            if i < len(old) and (left <= right or j == len(new)):
                axes.append(i)
                left *= old[i]
                i += 1
            elif j < len(new):
                extents.append(new[j])
                right *= new[j]
                j += 1
            if left == right and axes and extents:
                break
            if i == len(old) and j == len(new):
                break
        groups.append((axes, extents))
    return groups


def _pointwise(target: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """On the tensors as most of them lie; where that is even, on the numbers in order."""
    tensors = [value for value in args if isinstance(value, (Tensor, Turned))]
    if any(isinstance(value, (Tensor, Turned)) for value in kwargs.values()):
        result: Tensor = target(*_settled(args), **_settled(kwargs))
        return result
    rank = max(len(value.shape) for value in tensors)
    orders = [tuple(range(rank))]
    orders += [value.axes for value in tensors if isinstance(value, Turned) and len(value.axes) == rank]

    def laid(value: Any, axes: tuple[int, ...]) -> Any:
        if not isinstance(value, (Tensor, Turned)) or not value.shape:
            return value
        if len(value.shape) < rank:
            value = _view(value, [1] * (rank - len(value.shape)) + list(value.shape))
        return turned(value, sorted(range(rank), key=lambda axis: axes[axis]))

    def moved(axes: tuple[int, ...]) -> int:
        return sum(_numel(value) for value in (laid(v, axes) for v in tensors) if isinstance(value, Turned))

    best = min(orders, key=moved)
    return turned(target(*(_settled(laid(value, best)) for value in args), **kwargs), best)


def _reduce(target: OpOverload[..., Any]) -> Callable[..., Value]:
    def reduce(value: Value, dims: Sequence[int], keepdim: bool = False, **options: Any) -> Value:
        if isinstance(value, Tensor):
            value = Turned(value, tuple(range(value.dim())))
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
    across = a.shape[0] * b.shape[1] + sum(_numel(x) for x in (a, b) if not isinstance(x, Turned))
    if sum(_numel(x) for x in (a, b) if isinstance(x, Turned)) <= across:
        product: Tensor = aten.mm.default(settled(a), settled(b))
        return product
    return turned(aten.mm.default(settled(turned(b, (1, 0))), settled(turned(a, (1, 0)))), (1, 0))


def _numel(value: Value) -> int:
    return math.prod(value.shape)


_COPYING = {
    aten.expand.default: aten.expand_copy.default,
    aten.select.int: aten.select_copy.int,
    aten.slice.Tensor: aten.slice_copy.Tensor,
}
"""ExecuTorch has no views: what they give lies side by side, and may be viewed in any other shape."""

_RULES: dict[Any, Callable[..., Value]] = {
    aten.permute.default: _permute,
    aten.permute_copy.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: lambda value: _transpose(value, 0, 1),
    aten.clone.default: _as_it_is,
    aten.alias.default: _as_it_is,
    aten.detach.default: _as_it_is,
    aten.lift_fresh_copy.default: _as_it_is,
    aten.copy.default: _copy,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.mm.default: _multiply,
    **{target: _reduce(target) for target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)},
}
