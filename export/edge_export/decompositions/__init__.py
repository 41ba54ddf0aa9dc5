"""The backward pass in plain aten operations, those that ONNX has operators for.

``TRAIN`` and ``FORWARD`` are what the tracer consults: aten operator to a function that says the same in
simpler ones; ``TRAIN_RULES`` and ``RULES`` what permutations meet behind it.
PyTorch's own decompositions serve where they are exact and fast enough; ours replace those that have
no ONNX translation, or a slow one in ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from edge_export.decompositions import (
    activations,
    convolution,
    embedding,
    normalisation,
    padding,
    pooling,
    reductions,
    slices,
)
from edge_export.layouts import Rule, on_settled

aten = torch.ops.aten


def _zeros(size: Sequence[int], physical_layout: Sequence[int], **options: Any) -> Tensor:
    """Memory that PyTorch's ``1 - x`` (in SiLU's gradient) is about to fill; in ONNX all memory is filled."""
    del physical_layout
    return torch.zeros(size, **options)


OURS: dict[OpOverload[..., Any], Callable[..., Any]] = {
    aten.convolution_backward.default: convolution.backward,
    aten.avg_pool2d.default: pooling.average,
    aten.avg_pool2d_backward.default: pooling.average_backward,
    aten._adaptive_avg_pool2d.default: pooling.adaptive_average,
    aten._adaptive_avg_pool2d_backward.default: pooling.adaptive_average_backward,
    aten.adaptive_max_pool2d.default: pooling.adaptive_maximum,
    aten.adaptive_max_pool2d_backward.default: pooling.adaptive_maximum_backward,
    aten.embedding_dense_backward.default: embedding.backward,
    aten.threshold_backward.default: activations.threshold_backward,
    aten.hardtanh_backward.default: activations.hardtanh_backward,
    aten.reflection_pad2d_backward.default: padding.backward(padding.mirrored),
    aten.replication_pad2d_backward.default: padding.backward(padding.nearest),
    aten.var.correction: reductions.variance,
    aten.var_mean.correction: reductions.variance_and_mean,
    aten.linalg_vector_norm.default: reductions.vector_norm,
    aten.split_with_sizes.default: slices.split,
    aten.roll.default: slices.roll,
    aten.empty_permuted.default: _zeros,
    aten.isnan.default: lambda x: x != x,
}

# The indices that these exchange are ONNX's, which count over the whole tensor: see onnx_operators.py.
_KEPT = (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)

FORWARD: dict[OpOverload[..., Any], Callable[..., Any]] = {**core_aten_decompositions(), **OURS}
for _operator in _KEPT:
    FORWARD.pop(_operator, None)

# What pays where the weights change with every step, and would only bloat a program that predicts.
TRAIN: dict[OpOverload[..., Any], Callable[..., Any]] = {
    **FORWARD,
    aten.convolution.default: convolution.forward,
}

# How permutations move past what PyTorch has not, or ONNX has otherwise.
RULES: dict[OpOverload[..., Any], Rule] = {
    torch.ops.edge_export.affine.default: normalisation.affine,
    aten.mm.default: on_settled(aten.mm.default),  # Gemm takes a matrix either way
}

# A convolution that predicts is one whatever its kernel, and so are those around it.
TRAIN_RULES: dict[OpOverload[..., Any], Rule] = {
    **RULES,
    aten.convolution.default: convolution.turned_output,
}
