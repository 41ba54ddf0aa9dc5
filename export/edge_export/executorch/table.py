"""The table of decompositions: which operator is said in which others before it is lowered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from edge_export.decompositions import OURS
from edge_export.executorch import activations, convolution, pooling
from edge_export.executorch.convolution import multiply

aten = torch.ops.aten


def _biased_product(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """``aten.addmm`` in two: fused, it is a slow loop."""
    product = multiply(a, b)
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
    column = (-1, *[1] * (x.dim() - 2))
    empty = torch.zeros(0)
    return x * factor.view(column) + shift.view(column), empty, empty


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
    aten.addmm.default: _biased_product,
    aten.mm.default: multiply,
}
