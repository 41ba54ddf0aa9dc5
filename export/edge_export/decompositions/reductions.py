"""Variances and norms as sums, which every runtime has."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def variance_and_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """``aten.var_mean.correction``: squares about the mean, so that nothing cancels."""
    dims = list(dim) if dim else list(range(x.dim()))
    count = math.prod(x.shape[axis] for axis in dims)
    mean = x.mean(dims, keepdim=True)
    away = x - mean
    variance = (away * away).sum(dims, keepdim=keepdim) / (count - (1 if correction is None else correction))
    return variance, mean if keepdim else mean.squeeze(dims)


def variance(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = 1, keepdim: bool = False
) -> Tensor:
    """``aten.var.correction``."""
    return variance_and_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten.linalg_vector_norm`` of order 1, 2 or infinity."""
    dims = list(dim) if dim is not None else list(range(x.dim()))
    if dtype is not None or ord not in (1, 2, math.inf):
        return NotImplemented  # type: ignore[no-any-return]
    if ord == 2:
        return (x * x).sum(dims, keepdim=keepdim).sqrt()
    return x.abs().sum(dims, keepdim=keepdim) if ord == 1 else x.abs().amax(dims, keepdim=keepdim)
