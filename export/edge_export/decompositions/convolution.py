"""A 2-D convolution and its gradients, each in the form that ONNX Runtime computes fastest.

Shapes throughout: ``x`` [B, C, H, W], ``weight`` [Co, C / groups, kh, kw], ``grad_output`` [B, Co, Ho, Wo].
The batch may be symbolic; all else is known. Ho and Wo follow from the rest, as in ``nn.Conv2d``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from edge_export.decompositions import rowwise, spectral, toeplitz
from edge_export.decompositions.geometry import Geometry
from edge_export.decompositions.pointwise import Pointwise
from edge_export.decompositions.stock import Stock
from edge_export.errors import ExportError
from edge_export.layouts import Value, on_settled, turned

aten = torch.ops.aten


class Form(Protocol):
    """A way to compute the convolutions of one layer, without its bias."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """[B, Co, Ho, Wo]."""

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """[B, C, H, W]."""

    def weight_gradient(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """[Co, C / groups, kh, kw]."""


def form_of(weight: Tensor, geometry: Geometry) -> Form:
    """The fastest of the forms that a convolution has."""
    out_channels, channels = weight.shape[:2]
    if geometry.is_pointwise:
        return Pointwise()
    if geometry.groups > 1 and channels == 1 and out_channels == geometry.groups:
        if math.prod(geometry.size) * math.prod(geometry.out) <= toeplitz.MAX_ENTRIES:
            return toeplitz.Toeplitz(geometry)
        if rowwise.pays(geometry):
            return rowwise.Rowwise(geometry)
    if geometry.groups == 1 and spectral.pays(out_channels, channels, geometry):
        return spectral.spectral(geometry, weight)
    return Stock(geometry)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """``aten.convolution`` where another form is faster; NotImplemented leaves it as it is."""
    del output_padding
    of_batch = any(isinstance(size, torch.SymInt) for size in (*weight.shape, *x.shape[1:]))
    if transposed or x.dim() != 4 or of_batch:  # a weight gradient's kernel may be as large as the batch
        return NotImplemented  # type: ignore[no-any-return]
    form = form_of(weight, Geometry.of(x, weight, stride, padding, dilation, groups))
    if isinstance(form, Stock):
        return NotImplemented  # type: ignore[no-any-return]
    result = form.forward(x, weight)
    return result if bias is None else result + bias.view(-1, 1, 1)


def backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.convolution_backward``: gradients of input, weight and bias, those that the mask asks for.

    Raises:
        ExportError: the convolution is not over two axes.
    """
    del bias_sizes, output_padding
    if x.dim() != 4:
        kind = f"convolution over {x.dim() - 2} axes"
        raise ExportError(f"training a {kind} is not covered (aten.convolution_backward): use nn.Conv2d")
    by_bias = grad_output.sum((0, 2, 3)) if output_mask[2] else None
    if transposed:  # the same with input and output in each other's places
        stock = Stock(Geometry.of(grad_output, weight, stride, padding, dilation, groups))
        by_x = stock.forward(grad_output, weight) if output_mask[0] else None
        return by_x, stock.weight_gradient(x, grad_output, weight) if output_mask[1] else None, by_bias
    form = form_of(weight, Geometry.of(x, weight, stride, padding, dilation, groups))
    return (
        form.input_gradient(grad_output, weight) if output_mask[0] else None,
        form.weight_gradient(grad_output, x, weight) if output_mask[1] else None,
        by_bias,
    )


def turned_output(x: Value, weight: Value, *rest: Any) -> Value:
    """``aten.convolution``; if depthwise with channels outermost, as what lies around it wants them."""
    result = on_settled(aten.convolution.default)(x, weight, *rest)
    groups = rest[-1]
    if len(result.shape) != 4 or groups == 1 or groups != weight.shape[0]:
        return result
    outermost = (1, 0, 2, 3)
    return turned(aten.permute_copy.default(result, list(outermost)), outermost)
