"""Depthwise convolution on a small map as one matrix product a channel.

A convolution is linear in its map, so that for each channel it is a matrix [H·W, Ho·Wo] (a Toeplitz matrix
of two levels) that the kernel's taps fill: ``kernel @ patterns`` with a constant of zeros and ones. ONNX
Runtime has no fast depthwise kernel: on an 8 x 8 map a product over the batch takes less than half the time
for all three passes, on a 2 x 2 map a tenth.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from edge_export.decompositions.geometry import Geometry, meets

MAX_ENTRIES = 4096
"""Of one channel's matrix: an 8 x 8 map at stride 1 has as many. Building larger ones costs too much."""


class Toeplitz(NamedTuple):
    """Kernels [C, 1, kh, kw]: see :class:`edge_export.decompositions.convolution.Form`."""

    geometry: Geometry

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution [B, C, Ho, Wo]."""
        return _by_matrix(x, self._matrices(weight), self.geometry.out)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """The same by the transposed matrices."""
        return _by_matrix(grad_output, self._matrices(weight).transpose(1, 2), self.geometry.size)

    def weight_gradient(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """That by the matrices, summed by tap."""
        channels, patterns = weight.shape[0], self._patterns(x)
        if patterns.shape[1] == 1:
            by_matrix = (grad_output * x).sum((0, 2, 3)).reshape(channels, 1)
        else:
            by_matrix = (_by_channel(x).transpose(1, 2) @ _by_channel(grad_output)).reshape(channels, -1)
        return (by_matrix @ patterns.t()).reshape(weight.shape)

    def _matrices(self, weight: Tensor) -> Tensor:
        """Each channel's, [C, H·W, Ho·Wo]."""
        height, width = self.geometry.size
        channels = weight.shape[0]
        return (weight.reshape(channels, -1) @ self._patterns(weight)).reshape(channels, height * width, -1)

    def _patterns(self, like: Tensor) -> Tensor:
        """For each tap, which input pixel meets which output pixel: [kh·kw, H·W·Ho·Wo] of 0 and 1."""
        rows, columns = (meets(window, size, like) for window, size, _ in self.geometry.axes)
        both = rows[:, None, :, None, :, None] * columns[None, :, None, :, None, :]
        return both.reshape(rows.shape[0] * columns.shape[0], -1)


def _by_matrix(x: Tensor, matrix: Tensor, out: tuple[int, int]) -> Tensor:
    channels = matrix.shape[0]
    if matrix.shape[1:] == (1, 1):
        return x * matrix.reshape(channels, 1, 1)
    result = _by_channel(x) @ matrix
    return result.reshape(channels, -1, *out).transpose(0, 1)


def _by_channel(x: Tensor) -> Tensor:
    """[B, C, H, W] to [C, B, H·W]."""
    return x.transpose(0, 1).flatten(2)
