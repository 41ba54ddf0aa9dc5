"""Dense convolution by the convolution theorem: products of channels at each frequency of the maps.

Maps and kernel go through discrete Fourier transforms of their rows and columns, which are products with
constant matrices; there a convolution is one product of channels for each frequency, whatever the extent of
the kernel: of the multiplications of a 5 x 5 kernel on 16 x 16 maps a twelfth is left, and the transforms.
Three real products make a complex one (Gauss), so that nothing is complex: the convolution is a bilinear
form ``output.back(map.of(x) @ kernel.of(weight))`` with real matrices, and its gradients are the two others
of the same trilinear form. Padding, stride and dilation are the positions in the matrices.

In float32 the result is as near to the exact one as that of a sum over taps: a transform is orthogonal but
for its scale, and what is summed at each frequency is shorter.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from edge_export.decompositions.geometry import Geometry

Pair: TypeAlias = tuple[int, int]

MOST_NUMBERS = 1 << 23
"""That the spectrum of a layer's kernels may hold: 32 MB of float32, and as many for their gradient."""


def pays(out_channels: int, channels: int, geometry: Geometry) -> bool:
    """Whether a convolution is faster in this form.

    By what ONNX Runtime takes for a layer and its gradients: its own convolutions reach half of the speed of
    a product of matrices, and somewhat more where a stride leaves outputs out.
    """
    taps = geometry.rows.extent * geometry.columns.extent
    if channels < 4 or taps == 1:
        return False
    frequencies, period = _periods(geometry)[0] // 2 + 1, _periods(geometry)[1]
    points = frequencies * 3 * period
    if points * channels * out_channels > MOST_NUMBERS:
        return False
    transforms = sum(
        count * 2 * width * (frequencies * height + points)
        for count, (height, width) in ((channels, geometry.size), (out_channels, geometry.out))
    )
    limit = 2.2 if geometry.rows.stride == geometry.columns.stride == 1 else 1.05
    products = math.prod(geometry.out) * taps * channels * out_channels
    return points * channels * out_channels + transforms <= limit * products


class Spectrum(NamedTuple):
    """The transform of maps of H x W pixels into P = F · 3G numbers, and its transpose.

    A row of a map is real, so that F frequencies make up for all; a complex number is two rows of a matrix,
    and three where it awaits its product.
    """

    rows: Tensor  # [2F, H]
    columns: Tensor  # [3G, 2W]

    def of(self, maps: Tensor) -> Tensor:
        """[P, N] of N maps [H · W, N]."""
        count = maps.shape[1]
        by_row = self.rows @ maps.reshape(self.rows.shape[1], -1)
        return (self.columns @ by_row.reshape(-1, self.columns.shape[1], count)).reshape(-1, count)

    def back(self, points: Tensor) -> Tensor:
        """[H · W, N] of [P, N], by the transposed matrices."""
        count = points.shape[1]
        by_row = self.columns.t() @ points.reshape(-1, self.columns.shape[0], count)
        return (self.rows.t() @ by_row.reshape(self.rows.shape[0], -1)).reshape(-1, count)


class Spectral(NamedTuple):
    """Kernels [Co, C, kh, kw]: see :class:`edge_export.decompositions.convolution.Form`."""

    map: Spectrum
    kernel: Spectrum
    output: Spectrum
    size: Pair
    out: Pair

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """At each frequency the channels of the map by those of the kernels."""
        points = _of_maps(x, self.map) @ _of_kernels(weight, self.kernel)
        return _maps(points, self.output, self.out)

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """The channels of the output by those of the kernels."""
        points = _of_maps(grad_output, self.output) @ _of_kernels(weight, self.kernel).transpose(1, 2)
        return _maps(points, self.map, self.size)

    def weight_gradient(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Those of the map by those of the output."""
        out, channels, *kernel = weight.shape
        points = _of_maps(x, self.map).transpose(1, 2) @ _of_maps(grad_output, self.output)
        return self.kernel.back(points.flatten(1)).reshape(*kernel, channels, out).permute(3, 2, 0, 1)


def spectral(geometry: Geometry, like: Tensor) -> Spectral:
    """The form of one convolution, in the dtype of ``like``."""
    periods = _periods(geometry)
    seen = [range(size) for size in geometry.size]
    taps = [range(-w.padding, w.dilation * w.extent - w.padding, w.dilation) for w, _, _ in geometry.axes]
    seeing = [range(0, window.stride * out, window.stride) for window, _, out in geometry.axes]
    height, width = periods
    # A frequency that stands for its mirror image counts twice.
    shares = [(1 if f in (0, height / 2) else 2) / (height * width) for f in range(height // 2 + 1)]
    alone = [1.0] * len(shares)
    return Spectral(
        _spectrum(seen, periods, -1, ((1, 1), (1, 0), (0, 1)), alone, like),
        _spectrum(taps, periods, +1, ((1, 0), (-1, 1), (1, 1)), alone, like),
        _spectrum(seeing, periods, -1, ((1, 1), (0, 1), (-1, 0)), shares, like),
        geometry.size,
        geometry.out,
    )


def _periods(geometry: Geometry) -> Pair:
    """Extents of the transform: the padding before a map may be what lies behind it, as both are 0."""
    height, width = (size + window.padding for window, size, _ in geometry.axes)
    return height, width


def _spectrum(
    positions: list[range],
    periods: Pair,
    sign: int,
    mixes: tuple[Pair, Pair, Pair],
    shares: list[float],
    like: Tensor,
) -> Spectrum:
    """With ``exp(sign · i · angle)``; each of three numbers mixes the real and the imaginary part."""
    (height, width), rows, columns = periods, list[list[float]](), list[list[float]]()
    for frequency, share in enumerate(shares):
        angles = [2 * math.pi * frequency * p / height for p in positions[0]]
        rows.append([share * math.cos(angle) for angle in angles])
        rows.append([share * sign * math.sin(angle) for angle in angles])
    for frequency in range(width):
        angles = [2 * math.pi * frequency * p / width for p in positions[1]]
        cosines, sines = [math.cos(angle) for angle in angles], [sign * math.sin(angle) for angle in angles]
        for real, imaginary in mixes:
            # (c + is)(a + ib) = (ca - sb) + i(sa + cb)
            of_real = [real * c + imaginary * s for c, s in zip(cosines, sines, strict=True)]
            of_imaginary = [imaginary * c - real * s for c, s in zip(cosines, sines, strict=True)]
            columns.append(of_real + of_imaginary)
    return Spectrum(*(torch.tensor(m, dtype=like.dtype, device=like.device) for m in (rows, columns)))


def _of_maps(x: Tensor, by: Spectrum) -> Tensor:
    """[P, B, C] of [B, C, H, W]."""
    batch, channels, height, width = x.shape
    return by.of(x.reshape(-1, height * width).t()).reshape(-1, batch, channels)


def _of_kernels(weight: Tensor, by: Spectrum) -> Tensor:
    """[P, C, Co] of [Co, C, kh, kw]."""
    out, channels, *kernel = weight.shape
    return by.of(weight.permute(2, 3, 1, 0).reshape(math.prod(kernel), -1)).reshape(-1, channels, out)


def _maps(points: Tensor, by: Spectrum, size: Pair) -> Tensor:
    """[B, C, H, W] of [P, B, C]."""
    return by.back(points.flatten(1)).t().reshape(-1, points.shape[2], *size)
