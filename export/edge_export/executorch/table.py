"""The table of decompositions: which operator is said in which others before it is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from edge_export.batch_norm import affine
from edge_export.decompositions import OURS
from edge_export.executorch import activations, convolution, pooling
from edge_export.executorch.taps import multiply
from edge_export.layouts import on_settled

aten = torch.ops.aten


def _biased_product(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """``aten.addmm`` in two: fused, it is a slow loop."""
    product: Tensor = aten.mm.default(a, b)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def _normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """BatchNorm with given statistics, as one product and one sum by channel."""
    del momentum
    factor = torch.rsqrt(var + eps)
    if weight is not None:
        factor = factor * weight
    shift = -mean * factor
    if bias is not None:
        shift = shift + bias
    empty = torch.zeros(0)
    return affine(x, factor, shift), empty, empty


def _padded(x: Tensor, widths: Sequence[int], value: float = 0.0) -> Tensor:
    """Negative widths, which the gradients of paddings have, as slices: ExecuTorch's kernel knows none."""
    if min(widths) >= 0:
        return NotImplemented  # type: ignore[no-any-return]
    for dim, before, behind in zip(range(x.dim())[::-1], widths[::2], widths[1::2], strict=False):
        x = aten.slice.Tensor(x, dim, max(-before, 0), x.shape[dim] - max(-behind, 0))
    result: Tensor = aten.constant_pad_nd.default(x, [max(width, 0) for width in widths], value)
    return result


TABLE: dict[OpOverload[..., Any], Callable[..., Any]] = {
    **core_aten_decompositions(),
    **OURS,
    aten.convolution.default: convolution.forward,
    aten.convolution_backward.default: convolution.backward,
    aten.max_pool2d_with_indices.default: pooling.maximum,
    aten.max_pool2d_with_indices_backward.default: pooling.maximum_backward,
    aten.threshold_backward.default: activations.threshold_backward,
    aten.hardtanh_backward.default: activations.hardtanh_backward,
    aten._native_batch_norm_legit_no_training.default: _normalised,
    torch.ops.edge_export.affine.default: affine,
    aten.addmm.default: _biased_product,
    aten.constant_pad_nd.default: _padded,
}


RULES = {
    operator: on_settled(copying)
    for operator, copying in (
        (aten.select.int, aten.select_copy.int),
        (aten.slice.Tensor, aten.slice_copy.Tensor),
    )
}
"""ExecuTorch has no views: what they give lies side by side, and may be viewed in any other shape."""


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``aten.mm`` for a batch of one."""
    return multiply(a.reshape(1, *a.shape), b.reshape(1, *b.shape)).reshape(a.shape[0], b.shape[1])


def _sum(
    x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Over several axes up to the last: first over those before it, row by row, as memory lies."""
    last = x.dim() - 1
    gone = sorted(dim % x.dim() for dim in dims or range(x.dim()))
    if keepdim or dtype or len(gone) < 2 or gone[0] == 0 or gone != list(range(gone[0], x.dim())):
        return NotImplemented  # type: ignore[no-any-return]
    rows = x.reshape(*x.shape[: gone[0]], -1, x.shape[last])
    return rows.sum(gone[0]).sum(gone[0])


LOWERED = {**TABLE, aten.mm.default: _product, aten.sum.dim_IntList: _sum}
"""Once permutations have cancelled out."""
