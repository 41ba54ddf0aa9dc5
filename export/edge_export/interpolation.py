"""Maps of another size as products with constant matrices, one for each axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """``interpolate`` of [B, C, L] and [B, C, H, W] by the nearest pixel or linearly; else PyTorch's own."""
    if mode not in _SHARES or antialias or input.dim() > 4:
        return functional.interpolate(
            input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    axes = input.shape[2:]
    factors = _each(scale_factor, len(axes)) if scale_factor is not None else [None] * len(axes)
    wanted = _each(size, len(axes)) if size is not None else [None] * len(axes)
    for axis, (old, out, factor) in enumerate(zip(axes, wanted, factors, strict=True), start=2):
        new = int(out) if out is not None else math.floor(old * (factor or 1))
        step = 1 / factor if factor and not recompute_scale_factor else old / new
        matrix = _matrix(_SHARES[mode], old, new, step, bool(align_corners), input)
        input = input @ matrix.t() if axis == input.dim() - 1 else matrix @ input
    return input


Shares: TypeAlias = list[tuple[int, float]]


def _nearest(pixel: float, step: float, size: int) -> Shares:
    # In float32, as PyTorch: rounding decides where a pixel falls between two.
    return [(min(math.floor(np.float32(pixel) * np.float32(step)), size - 1), 1.0)]


def _nearest_exact(pixel: float, step: float, size: int) -> Shares:
    return _nearest(pixel + 0.5, step, size)


def _linear(pixel: int, step: float, size: int) -> Shares:
    return _between(max((pixel + 0.5) * step - 0.5, 0.0), size)


def _between(position: float, size: int) -> Shares:
    first = min(math.floor(position), size - 1)
    share = min(position - first, 1.0)
    return [(first, 1 - share), (min(first + 1, size - 1), share)]


_SHARES: dict[str, Callable[[int, float, int], Shares]] = {
    "nearest": _nearest,
    "nearest-exact": _nearest_exact,
    "linear": _linear,
    "bilinear": _linear,
}
"""Shares of the old pixels in a new one, from its number, the step between two in old ones, the old size."""


def _matrix(
    shares: Callable[[int, float, int], Shares], old: int, new: int, step: float, corners: bool, like: Tensor
) -> Tensor:
    """[new, old]."""
    rows = [[0.0] * old for _ in range(new)]
    for pixel, row in enumerate(rows):
        of = _between(pixel * (old - 1) / max(new - 1, 1), old) if corners else shares(pixel, step, old)
        for source, share in of:
            row[source] += share
    return torch.tensor(rows, dtype=like.dtype, device=like.device)


def _each(value: float | Sequence[float], count: int) -> list[float | None]:
    return [value] * count if isinstance(value, (int, float)) else list(value)
