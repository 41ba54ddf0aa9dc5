"""BatchNorm that weighs each sample, with a backward pass written out in the fewest passes over the maps.

Ioffe and Szegedy (arXiv 1502.03167) with Σw in place of the batch's size. On a device each pass over a map
costs memory traffic and little else, so both directions are sums of planes, small algebra on [B, C] and [C],
and scale-and-shift by channel, which ONNX does in one pass (its BatchNormalization in inference mode).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

LARGE_MAP = 128
"""Pixels from which ONNX Runtime scales or shifts faster alone than in one BatchNormalization."""


class WeightedNormalisation(torch.autograd.Function):
    """``apply(x, sample_weight, scale, shift, eps)``: output, mean, biased variance, and what is kept.

    x [B, C, ...], sample_weight [B], scale and shift [C], all of one float dtype. Mean and variance are [C];
    no gradient passes through them. A sample of weight 0 has no say, and gets a gradient only from its own
    output's.
    """

    @staticmethod
    def forward(  # noqa: D102 - torch's protocol
        x: Tensor, sample_weight: Tensor, scale: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        count = sample_weight.sum() * (x[0, 0].numel())
        mean = weighted_sum(x, sample_weight) / count
        centred = shift_channels(x, -mean)
        variance = weighted_sum(centred * centred, sample_weight) / count
        inverse = torch.rsqrt(variance + eps)
        return scale_and_shift(centred, scale * inverse, shift), mean, variance, centred, inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: D102
        _, sample_weight, scale, _, _ = inputs
        _, mean, variance, centred, inverse = output
        ctx.mark_non_differentiable(mean, variance, centred, inverse)
        ctx.save_for_backward(centred, sample_weight, scale, inverse)

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, grad: Tensor, *_: Tensor
    ) -> tuple[Tensor, None, Tensor, Tensor, None]:
        centred, sample_weight, scale, inverse = ctx.saved_tensors
        dims = [0, *range(2, grad.dim())]
        count = sample_weight.sum() * (centred[0, 0].numel())
        by_shift = grad.sum(dims)
        by_scale = (grad * centred).sum(dims) * inverse
        factor = scale * inverse
        slope, offset = -factor * inverse * by_scale / count, -factor * by_shift / count
        # Each sample passes on, by its weight, what it did to mean and variance.
        correction = scale_and_shift_planes(
            centred, sample_weight.unsqueeze(1) * slope, sample_weight.unsqueeze(1) * offset
        )
        return scale_channels(grad, factor) + correction, None, by_scale, by_shift, None


def weighted_sum(x: Tensor, sample_weight: Tensor) -> Tensor:
    """Σ over samples and pixels of weight times ``x``: [C]. The weights meet sums of planes only."""
    planes = x.flatten(2).sum(2) if x.dim() > 2 else x
    return (sample_weight.unsqueeze(0) @ planes).squeeze(0)


def shift_channels(x: Tensor, shift: Tensor) -> Tensor:
    """``x + shift`` by channel."""
    if _is_large(x):
        return x + _column(shift, x)
    return _affine(x, torch.ones_like(shift), shift)


def scale_channels(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale`` by channel."""
    if _is_large(x):
        return x * _column(scale, x)
    return _affine(x, scale, torch.zeros_like(scale))


def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * scale + shift`` by channel."""
    return _affine(x, scale, shift)


def scale_and_shift_planes(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * scale + shift``, both [B, C]: the planes of all samples as channels of one."""
    if x.dim() < 3:
        return x * scale + shift
    flat = x.reshape(1, -1, *x.shape[2:])
    return _affine(flat, scale.reshape(-1), shift.reshape(-1)).reshape(x.shape)


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    if x.dim() < 3:
        return x * scale + shift
    zeros, ones = torch.zeros_like(shift), torch.ones_like(shift)
    result: Tensor = aten._native_batch_norm_legit_no_training(x, scale, shift, zeros, ones, 0.0, 0.0)[0]
    return result


def _is_large(x: Tensor) -> bool:
    return x.dim() < 3 or int(x[0, 0].numel()) >= LARGE_MAP


def _column(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))
