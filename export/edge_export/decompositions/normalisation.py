"""Scale and shift by channel as BatchNormalization in inference mode: ONNX Runtime does it in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from edge_export import batch_norm

aten = torch.ops.aten

LARGE_MAP = 128
"""Pixels from which ONNX Runtime scales or shifts faster alone than in one BatchNormalization."""


def affine(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """``edge_export::affine``; by plane, the planes of all samples are the channels of one."""
    given = scale if shift is None else shift
    assert given is not None
    alone = (scale is None or shift is None) and x.dim() > 2 and int(x[0, 0].numel()) >= LARGE_MAP
    if x.dim() < 3 or alone:
        return batch_norm.affine(x, scale, shift)
    factors = (torch.ones_like(given) if scale is None else scale).reshape(-1)
    terms = (torch.zeros_like(given) if shift is None else shift).reshape(-1)
    flat = x if given.dim() == 1 else x.reshape(1, -1, *x.shape[2:])
    zeros, ones = torch.zeros_like(terms), torch.ones_like(terms)
    result: Tensor = aten._native_batch_norm_legit_no_training(flat, factors, terms, zeros, ones, 0.0, 0.0)[0]
    return result.reshape(x.shape)
