"""Scale and shift by channel in one pass over the maps, for which ONNX Runtime has two operators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from edge_export import batch_norm
from edge_export.layouts import Turned, Value, settled, turned

aten = torch.ops.aten

LARGE_MAP = 128
"""Pixels from which ONNX Runtime scales or shifts faster alone than in one BatchNormalization."""


LONG_ROW = 16
"""Pixels from which a convolution is faster than one BatchNormalization where channels are outermost."""


def affine(x: Value, scale: Value | None, shift: Value | None) -> Value:
    """``edge_export::affine`` on maps whose batch or whose channels are the outermost axis."""
    given = [None if factor is None else settled(factor) for factor in (scale, shift)]
    if not isinstance(x, Turned) or x.axes[:2] != (1, 0):
        return _by_plane(settled(x), *given)
    rows = x.base.reshape(1, x.base.shape[0], 1, -1)
    long = math.prod(x.base.shape[2:]) >= LONG_ROW
    return turned(_by_row(rows, *given, long=long).reshape(x.base.shape), x.axes)


def _by_plane(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """[B, C, ...]: both in one pass where maps are too small for two."""
    alone = (scale is None or shift is None) and x.dim() > 2 and int(x[0, 0].numel()) >= LARGE_MAP
    return batch_norm.affine(x, scale, shift) if x.dim() < 3 or alone else _normalised(x, scale, shift)


def _by_row(x: Tensor, scale: Tensor | None, shift: Tensor | None, *, long: bool) -> Tensor:
    """[1, C, 1, N]: the convolution of each row by one number, which activations are merged into."""
    if scale is None or shift is None:
        return batch_norm.affine(x, scale, shift)
    if not long:
        return _normalised(x, scale, shift)
    kernel, channels = scale.reshape(-1, 1, 1, 1), int(x.shape[1])
    still: tuple[Any, ...] = ((1, 1), (0, 0), (1, 1), False, (0, 0))
    result: Tensor = aten.convolution(x, kernel, shift, *still, channels)
    return result


def _normalised(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """BatchNormalization in inference mode, by statistics that change nothing."""
    given = scale if shift is None else shift
    assert given is not None
    zeros, ones = _full(given, 0.0), _full(given, 1.0)
    factors, terms = (ones if scale is None else scale), (zeros if shift is None else shift)
    result: Tensor = aten._native_batch_norm_legit_no_training(x, factors, terms, zeros, ones, 0.0, 0.0)[0]
    return result


def _full(like: Tensor, value: float) -> Tensor:
    return torch.full(like.shape, value, dtype=like.dtype, device=like.device)
