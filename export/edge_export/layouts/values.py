"""Tensors that are not laid out in memory as the graph sees them, and what it takes to lay them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

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


def on_settled(function: Callable[..., Any]) -> Rule:
    """The rule of an operator that takes the numbers in order."""
    return lambda *args, **kwargs: function(*all_settled(args), **all_settled(kwargs))


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


def all_settled(values: Any) -> Any:
    """The same for every tensor in a tree of arguments."""
    return torch.utils._pytree.tree_map(
        lambda value: settled(value) if is_value(value) else value, values, is_leaf=is_value
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
    return base if shape == list(base.shape) else base.reshape(shape)


def repeated(value: Value, shape: Sequence[int]) -> Value:
    """``value.expand(shape)``; nothing is copied, but for an axis that is new."""
    if len(shape) != len(value.shape) or isinstance(value, Repeated):
        result: Tensor = aten.expand_copy.default(settled(value), shape)
        return result
    return Repeated(value, tuple(n if m == -1 else m for n, m in zip(value.shape, shape, strict=True)))


def dtype_of(value: Value) -> torch.dtype:
    """The dtype of its numbers."""
    if isinstance(value, Repeated):
        value = value.value
    return value.dtype if isinstance(value, Tensor) else value.base.dtype


def is_value(value: object) -> TypeGuard[Value]:
    """Whether an argument is a tensor."""
    return isinstance(value, (Tensor, Turned, Repeated))


def count(shape: Sequence[int]) -> int:
    """Its numbers, for a batch of 32 where the batch may have any size."""
    return math.prod(number(extent, 32) for extent in shape)


def number(extent: int | torch.SymInt, batch: int) -> int:
    """An extent where the batch, if it is unknown, is ``batch``: to compare it would fix its size."""
    if isinstance(extent, int):
        return extent
    expression = extent.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, batch)))
