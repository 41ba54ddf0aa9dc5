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
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Pair: TypeAlias = tuple[int, int]

MOST_NUMBERS = 1 << 23
"""That the spectrum of a layer's kernels may hold: 32 MB of float32, and as many for their gradient."""


def pays(shape: Sequence[int], size: Pair, out: Pair, stride: Pair, padding: Pair) -> bool:
    """Whether kernels of ``shape`` [Co, C, kh, kw] are applied faster to maps of ``size`` in this form.

    By what ONNX Runtime takes for a layer and its gradients: its own convolutions reach half of the speed of
    a product of matrices, and somewhat more where a stride leaves outputs out.
    """
    out_channels, channels, *kernel = shape
    if channels < 4 or math.prod(kernel) == 1:
        return False
    periods = _periods(size, padding)
    frequencies, points = periods[0] // 2 + 1, _points(periods)
    if points * channels * out_channels > MOST_NUMBERS:
        return False
    transforms = sum(
        count * 2 * width * (frequencies * height + points)
        for count, (height, width) in ((channels, size), (out_channels, out))
    )
    limit = 2.2 if stride == (1, 1) else 1.05
    taps = math.prod(out) * math.prod(kernel) * channels * out_channels
    return points * channels * out_channels + transforms <= limit * taps


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


class Spectra(NamedTuple):
    """The three transforms of one convolution."""

    map: Spectrum
    kernel: Spectrum
    output: Spectrum


def spectra(
    kernel: Pair, size: Pair, out: Pair, stride: Pair, padding: Pair, dilation: Pair, like: Tensor
) -> Spectra:
    """Those of maps of ``size`` to maps of ``out``, in the dtype of ``like``."""
    periods = _periods(size, padding)
    seen = [range(n) for n in size]
    taps = [range(-p, d * k - p, d) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    seeing = [range(0, s * n, s) for n, s in zip(out, stride, strict=True)]
    height, width = periods
    # A frequency that stands for its mirror image counts twice.
    shares = [(1 if f in (0, height / 2) else 2) / (height * width) for f in range(height // 2 + 1)]
    alone = [1.0] * len(shares)
    return Spectra(
        _spectrum(seen, periods, -1, ((1, 1), (1, 0), (0, 1)), alone, like),
        _spectrum(taps, periods, +1, ((1, 0), (-1, 1), (1, 1)), alone, like),
        _spectrum(seeing, periods, -1, ((1, 1), (0, 1), (-1, 0)), shares, like),
    )


def _periods(size: Pair, padding: Pair) -> Pair:
    """Extents of the transform: the padding before a map may be what lies behind it, as both are 0."""
    return size[0] + padding[0], size[1] + padding[1]


def _points(periods: Pair) -> int:
    """P, the real products for each pair of channels."""
    return (periods[0] // 2 + 1) * 3 * periods[1]


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


def forward(x: Tensor, weight: Tensor, by: Spectra, out: Pair) -> Tensor:
    """The convolution [B, Co, Ho, Wo] of ``x`` [B, C, H, W] with ``weight`` [Co, C, kh, kw]."""
    points = _of_maps(x, by.map) @ _of_kernels(weight, by.kernel)
    return _maps(points, by.output, out)


def input_gradient(grad_output: Tensor, weight: Tensor, by: Spectra, size: Pair) -> Tensor:
    """The gradient [B, C, H, W] by the map."""
    points = _of_maps(grad_output, by.output) @ _of_kernels(weight, by.kernel).transpose(1, 2)
    return _maps(points, by.map, size)


def weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, by: Spectra) -> Tensor:
    """The gradient [Co, C, kh, kw] by the kernels."""
    out, channels, *kernel = weight.shape
    points = _of_maps(x, by.map).transpose(1, 2) @ _of_maps(grad_output, by.output)
    return by.kernel.back(points.flatten(1)).reshape(*kernel, channels, out).permute(3, 2, 0, 1)


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
