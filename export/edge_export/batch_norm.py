"""BatchNorm that weighs each sample, with a backward pass written out in the fewest passes over the maps.

Ioffe and Szegedy (arXiv 1502.03167) with Σw in place of the batch's size. On a device each pass over a map
costs memory traffic and little else, so both directions are sums of planes, small algebra on [C], and
scale-and-shift by channel, an operator that each lowering says in what its runtime does in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        share = sample_weight / (sample_weight.sum() * x[0, 0].numel())
        mean = weighted_sum(x, share)
        centred = shift_channels(x, -mean)
        variance = weighted_sum(centred * centred, share)
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
        share = sample_weight / (sample_weight.sum() * centred[0, 0].numel())
        by_shift = grad.sum(dims)
        by_scale = (grad * centred).sum(dims) * inverse
        factor = scale * inverse
        # Each sample passes on, by its weight, what it did to mean and variance.
        correction = scale_and_shift(centred, -factor * inverse * by_scale, -factor * by_shift)
        correction = correction * share.reshape(-1, *[1] * (grad.dim() - 1))
        return scale_channels(grad, factor) + correction, None, by_scale, by_shift, None


def weighted_sum(x: Tensor, sample_weight: Tensor) -> Tensor:
    """Σ over samples and pixels of weight times ``x``: [C]. The weights meet sums of planes only."""
    planes = x.flatten(2).sum(2) if x.dim() > 2 else x
    return (sample_weight.unsqueeze(0) @ planes).squeeze(0)


def shift_channels(x: Tensor, shift: Tensor) -> Tensor:
    """``x + shift`` by channel."""
    return _as_operator(x, None, shift)


def scale_channels(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale`` by channel."""
    return _as_operator(x, scale, None)


def scale_and_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``x * scale + shift`` by channel."""
    return _as_operator(x, scale, shift)


def affine(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """``x * scale + shift`` by channel, [C], whichever are given."""
    for factor, combine in ((scale, torch.mul), (shift, torch.add)):
        if factor is not None:
            x = combine(x, factor.reshape(-1, *[1] * (x.dim() - 2)))
    return x


# An operator of its own, so that each table of decompositions can say it in its own way.
_LIBRARY = torch.library.Library("edge_export", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("affine(Tensor x, Tensor? scale, Tensor? shift) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("affine", affine, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _as_operator(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.edge_export.affine(x, scale, shift)
    return result
