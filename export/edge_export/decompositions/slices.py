"""Parts of a tensor, and their exchange, as slices and what lies behind one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def split(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """``aten.split_with_sizes``: one slice after another."""
    ends = [sum(sizes[: part + 1]) for part in range(len(sizes))]
    return [x.narrow(dim, end - size, size) for end, size in zip(ends, sizes, strict=True)]


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """``aten.roll``: what is pushed out at one end of an axis comes in at the other."""
    if not dims:
        return roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        if first := shift % size:
            x = torch.cat([x.narrow(dim, size - first, first), x.narrow(dim, 0, size - first)], dim)
    return x
