"""The gradients of a convolution by ONNX Runtime's own, each in the form that it computes fastest.

Shapes throughout: ``x`` [B, C, H, W], ``weight`` [Co, C / groups, kh, kw], ``grad_output`` [B, Co, Ho, Wo].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from edge_export.decompositions.geometry import Geometry
from edge_export.decompositions.rowwise import Rowwise

aten = torch.ops.aten

MOST_TAPS = 32
"""Of all channels of a window, up to which a product with as many copies what the window sees fastest."""


class Stock(NamedTuple):
    """Any kernel: see :class:`edge_export.decompositions.convolution.Form`."""

    geometry: Geometry

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """As it is."""
        return _convolve(x, weight, self.geometry)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """A convolution with the kernel turned, or a transposed one."""
        rows, columns, _, groups = self.geometry
        depthwise = weight.shape[1] == 1 and weight.shape[0] == groups
        # Turning needs the padding that is left over to be none below 0.
        fits = all(window.flipped().padding >= 0 for window in (rows, columns))
        if depthwise and rows.stride == columns.stride == 1 and fits:
            return flipped_input_gradient(grad_output, weight, self.geometry)
        return transposed_input_gradient(grad_output, weight, self.geometry)

    def weight_gradient(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """By products of matrices, but for groups of several channels."""
        groups = self.geometry.groups
        if weight.shape[1] == 1 and weight.shape[0] == groups > 1:
            return Rowwise(self.geometry).weight_gradient(grad_output, x, weight)
        if groups > 1:
            return swapped_weight_gradient(grad_output, x, weight, self.geometry)
        if weight[0].numel() <= MOST_TAPS:
            return unfolded_weight_gradient(grad_output, x, weight, self.geometry)
        if x.shape[1] >= 16:
            return tapwise_weight_gradient(grad_output, x, weight, self.geometry)
        return rowwise_weight_gradient(grad_output, x, weight, self.geometry)


def flipped_input_gradient(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For depthwise at stride 1: the convolution with the kernel turned by 180 degrees."""
    rows, columns = geometry.rows.flipped(), geometry.columns.flipped()
    return _convolve(grad_output, weight.flip(2, 3), geometry._replace(rows=rows, columns=columns))


def transposed_input_gradient(grad_output: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For all others: the transposed convolution, padded by the rows that no window reached."""
    unreached = [
        size - ((out - 1) * window.stride - 2 * window.padding + window.reach)
        for window, size, out in geometry.axes
    ]
    return _convolve(grad_output, weight, geometry, unreached)


def unfolded_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For three channels: what a window sees as channels, by a convolution that copies, and one product."""
    taps = weight[0].numel()
    copying = torch.eye(taps, dtype=x.dtype, device=x.device).reshape(taps, *weight.shape[1:])
    seen = _convolve(x, copying, geometry).transpose(0, 1).reshape(taps, -1)
    rows = grad_output.transpose(0, 1).reshape(weight.shape[0], -1)
    return (rows @ seen.t()).reshape(weight.shape)


def tapwise_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For 16 input channels or more: a product for each tap of the kernel, with the channels last."""
    out_channels, channels, *kernel = weight.shape
    above, beside = _taps(geometry)
    padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, *_around(geometry)))
    rows = grad_output.transpose(0, 1).reshape(out_channels, -1)
    taps = [rows @ padded[:, i, j].reshape(-1, channels) for i in above for j in beside]
    return torch.stack(taps, 2).reshape(out_channels, channels, *kernel)


def rowwise_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For few input channels: the taps of a kernel row side by side as channels, a product for each row."""
    out_channels, channels, height, width = weight.shape
    pixels = math.prod(geometry.out)
    above, beside = _taps(geometry)
    padded = functional.pad(x, _around(geometry))
    columns = torch.cat([padded[:, :, :, j] for j in beside], 1)
    flat = grad_output.reshape(-1, out_channels, pixels)
    rows = [
        (flat @ columns[:, :, i].reshape(-1, width * channels, pixels).transpose(1, 2)).sum(0) for i in above
    ]
    return torch.stack(rows, 1).reshape(out_channels, height, width, channels).permute(0, 3, 1, 2)


def swapped_weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """For groups: a convolution with batch and channels swapped, stride and dilation exchanged."""
    groups, (kh, kw) = geometry.groups, weight.shape[2:]
    channels, height, width = x.shape[1:]
    swapped = x.reshape(-1, groups, channels // groups, height, width).permute(2, 1, 0, 3, 4)
    rows, columns = (
        window._replace(stride=window.dilation, dilation=window.stride)
        for window in (geometry.rows, geometry.columns)
    )
    result = _convolve(
        swapped.reshape(channels // groups, -1, height, width),
        grad_output.transpose(0, 1),
        geometry._replace(rows=rows, columns=columns),
    )
    return result[:, :, :kh, :kw].transpose(0, 1).reshape(weight.shape)


def _taps(geometry: Geometry) -> tuple[list[slice], list[slice]]:
    """For each tap of the kernel the rows, and the columns, of the padded map that it meets."""
    above, beside = (
        [
            slice(tap * window.dilation, tap * window.dilation + window.stride * (out - 1) + 1, window.stride)
            for tap in range(window.extent)
        ]
        for window, _, out in geometry.axes
    )
    return above, beside


def _around(geometry: Geometry) -> tuple[int, int, int, int]:
    beside, above = geometry.columns.padding, geometry.rows.padding
    return beside, beside, above, above


def _convolve(x: Tensor, weight: Tensor, geometry: Geometry, unreached: list[int] | None = None) -> Tensor:
    """Transposed where ``unreached`` is given."""
    strides, paddings, dilations = zip(geometry.rows[1:4], geometry.columns[1:4], strict=True)
    transposed = unreached is not None
    result: Tensor = aten.convolution(
        x, weight, None, strides, paddings, dilations, transposed, unreached or (0, 0), geometry.groups
    )
    return result
