"""Permutations that wait until somebody needs the numbers in another order: most of them cancel out.

A convolution wants its maps with the batch innermost, a linear layer the transpose of its weight, and
autograd turns back what either has turned; as kernels each of these would be a pass over the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
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


class Repeated(NamedTuple):
    """``value.expand(shape)``, of the same rank: an operator that broadcasts needs no copies."""

    value: Tensor | Turned
    shape: tuple[int, ...]


Value: TypeAlias = Tensor | Turned | Repeated


Rule: TypeAlias = Callable[..., Value]
"""What an operator does to tensors that may be turned."""


def without_permutations(
    graph: fx.GraphModule, inputs: Sequence[Tensor], rules: Mapping[OpOverload[..., Any], Rule]
) -> fx.GraphModule:
    """The same function with the permutations that are left, each where its result is used.

    Args:
        inputs: fake tensors, whose sizes may be symbolic.
        rules: a runtime's own, for operators that are none of PyTorch's or that it says otherwise.
    """
    interpreter = _Interpreter(graph, {**_RULES, **rules})
    traced = make_fx(lambda *tensors: interpreter.run(*tensors), tracing_mode="symbolic")(*inputs)
    traced.graph.eliminate_dead_code()
    return traced


class _Interpreter(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, rules: Mapping[Any, Rule]) -> None:
        super().__init__(graph)
        self._rules = rules

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on tensors that may be turned."""
        if rule := self._rules.get(target):
            return rule(*args, **kwargs)
        if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
            return _pointwise(target, args, kwargs)
        return on_settled(target)(*args, **kwargs)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results, turned as they are to be."""
        return super().output(target, _settled(args), kwargs)


def on_settled(function: Callable[..., Any]) -> Rule:
    """The rule of an operator that takes the numbers in order."""
    return lambda *args, **kwargs: function(*_settled(args), **_settled(kwargs))


def settled(value: Value) -> Tensor:
    """The tensor with its numbers in the order of its axes."""
    if isinstance(value, Tensor):
        return value
    result: Tensor
    if isinstance(value, Repeated):
        result = aten.expand_copy.default(settled(value.value), list(value.shape))
    else:
        result = aten.permute_copy.default(value.base, list(value.axes))
    return result


def _settled(values: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda value: settled(value) if _is_value(value) else value, values, is_leaf=_is_value
    )


def turned(value: Value, axes: Sequence[int]) -> Value:
    """``value.permute(axes)``; nothing is moved."""
    if isinstance(value, Repeated):
        value = settled(value)
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
    if isinstance(value, Repeated):
        value = value.value
    return value.dtype if isinstance(value, Tensor) else value.base.dtype


def _expand(value: Value, shape: Sequence[int], **_: Any) -> Value:
    if len(shape) != len(value.shape) or isinstance(value, Repeated):
        result: Tensor = aten.expand_copy.default(settled(value), shape)
        return result
    return Repeated(value, tuple(n if m == -1 else m for n, m in zip(value.shape, shape, strict=True)))


def _squeeze(value: Value, dims: int | Sequence[int]) -> Value:
    gone = {dim % len(value.shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    return _view(value, [n for axis, n in enumerate(value.shape) if n != 1 or axis not in gone])


def _unsqueeze(value: Value, dim: int) -> Value:
    shape = list(value.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return _view(value, shape)


def _view(value: Value, shape: Sequence[int]) -> Value:
    """Merge or split axes without moving anything, where what is merged lies side by side in memory."""
    if not isinstance(value, Turned):
        return _viewed(settled(value), shape)
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
    return x.reshape(shape)


def _groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest parts of both shapes that hold as many elements: axes of the old, extents of the new."""
    # A batch of unknown size is like no other extent.
    before, after = ([_number(extent, 1009) for extent in extents] for extents in (old, new))
    known = math.prod(extent for extent in after if extent != -1)
    new = [extent if extent != -1 else math.prod(old) // math.prod(new) * -1 for extent in new]
    after = [extent if extent != -1 else math.prod(before) // known for extent in after]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        axes, extents, left, right = [], [], 1, 1
        while True:
            if i < len(old) and (left <= right or j == len(new)):
                axes.append(i)
                left *= before[i]
                i += 1
            elif j < len(new):
                extents.append(new[j])
                right *= after[j]
                j += 1
            if left == right and axes and extents:
                break
            if i == len(old) and j == len(new):
                break
        groups.append((axes, extents))
    return groups


def _pointwise(target: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Value:
    """On the tensors as most of them lie; where that is even, on the numbers in order."""
    if any(_is_value(value) for value in kwargs.values()):
        result: Tensor = target(*_settled(args), **_settled(kwargs))
        return result
    given = [value for value in args if _is_value(value)]
    repeated = [value for value in given if isinstance(value, Repeated)]
    if repeated and len(repeated) == len(given) == 1:
        once = [value.value if isinstance(value, Repeated) else value for value in args]
        return _expand(_pointwise(target, tuple(once), kwargs), repeated[0].shape)
    # What is as large as the result lets the others be repeated by it.
    whole = [value.shape for value in given if not isinstance(value, Repeated)]
    args = tuple(
        value.value if isinstance(value, Repeated) and value.shape in map(tuple, whole) else value
        for value in args
    )
    args = tuple(settled(value) if isinstance(value, Repeated) else value for value in args)
    tensors = [value for value in args if _is_value(value)]
    rank = max(len(value.shape) for value in tensors)
    orders = [tuple(range(rank))]
    orders += [value.axes for value in tensors if isinstance(value, Turned) and len(value.axes) == rank]

    def laid(value: Any, axes: tuple[int, ...]) -> Any:
        if not _is_value(value) or not value.shape:
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
    across = _count((a.shape[0], b.shape[1])) + sum(_numel(x) for x in (a, b) if not isinstance(x, Turned))
    if sum(_numel(x) for x in (a, b) if isinstance(x, Turned)) <= across:
        product: Tensor = aten.mm.default(settled(a), settled(b))
        return product
    return turned(aten.mm.default(settled(turned(b, (1, 0))), settled(turned(a, (1, 0)))), (1, 0))


def _numel(value: Value) -> int:
    return _count(value.shape)


def _count(shape: Sequence[int]) -> int:
    return math.prod(_number(extent, 32) for extent in shape)


def _number(extent: int | torch.SymInt, batch: int) -> int:
    """An extent where the batch, if it is unknown, is ``batch``: to compare it would fix its size."""
    if isinstance(extent, int):
        return extent
    expression = extent.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))


def _is_value(value: object) -> TypeGuard[Value]:
    return isinstance(value, (Tensor, Turned, Repeated))


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
    aten.expand.default: _expand,
    aten._to_copy.default: lambda value, **options: _pointwise(aten._to_copy.default, (value,), options),
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.mm.default: _multiply,
    aten.sym_size.int: lambda value, dim: value.shape[dim],
    **{target: _reduce(target) for target in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default)},
}
