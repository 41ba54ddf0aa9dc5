"""Depthwise convolution on a small map as one matrix product a channel.

A convolution is linear in its map, so that for each channel it is a matrix [H·W, Ho·Wo] (a Toeplitz matrix
of two levels) that the kernel's taps fill: ``kernel @ patterns`` with a constant of zeros and ones. ONNX
Runtime has no fast depthwise kernel: on an 8 x 8 map a product over the batch takes less than half the time
for all three passes, on a 2 x 2 map a tenth.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MAX_ENTRIES = 4096
"""Of one channel's matrix: an 8 x 8 map at stride 1 has as many. Building larger ones costs too much."""


def patterns(
    kernel: tuple[int, int],
    size: tuple[int, int],
    out: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    like: Tensor,
) -> Tensor:
    """For each tap, which input pixel meets which output pixel: [kh·kw, H·W·Ho·Wo] of 0 and 1."""
    axes = [
        _meets(k, n, o, s, p, d, like)
        for k, n, o, s, p, d in zip(kernel, size, out, stride, padding, dilation, strict=True)
    ]
    rows, columns = axes
    both = rows[:, None, :, None, :, None] * columns[None, :, None, :, None, :]
    return both.reshape(kernel[0] * kernel[1], -1)


def _meets(k: int, n: int, o: int, stride: int, padding: int, dilation: int, like: Tensor) -> Tensor:
    taps, pixels, outputs = (torch.arange(count, device=like.device) for count in (k, n, o))
    met = outputs * stride - padding + taps.view(k, 1, 1) * dilation
    return (pixels.view(1, n, 1) == met).to(like.dtype)


def matrices(weight: Tensor, pattern: Tensor, pixels: int) -> Tensor:
    """The matrix of each channel, [C, H·W, Ho·Wo], of the kernels ``weight`` [C, 1, kh, kw]."""
    channels = weight.shape[0]
    return (weight.reshape(channels, -1) @ pattern).reshape(channels, pixels, -1)


def forward(x: Tensor, matrix: Tensor, out: tuple[int, int]) -> Tensor:
    """The convolution [B, C, Ho, Wo] of ``x`` [B, C, H, W]."""
    channels = matrix.shape[0]
    if matrix.shape[1:] == (1, 1):
        return x * matrix.reshape(channels, 1, 1)
    result = _by_channel(x) @ matrix
    return result.reshape(channels, -1, *out).transpose(0, 1)


def input_gradient(grad_output: Tensor, matrix: Tensor, size: tuple[int, int]) -> Tensor:
    """The gradient [B, C, H, W] by the map."""
    return forward(grad_output, matrix.transpose(1, 2), size)


def weight_gradient(grad_output: Tensor, x: Tensor, weight: Tensor, pattern: Tensor) -> Tensor:
    """The gradient [C, 1, kh, kw] by the kernels."""
    channels = weight.shape[0]
    if pattern.shape[1] == 1:
        by_matrix = (grad_output * x).sum((0, 2, 3)).reshape(channels, 1)
    else:
        by_matrix = (_by_channel(x).transpose(1, 2) @ _by_channel(grad_output)).reshape(channels, -1)
    return (by_matrix @ pattern.t()).reshape(weight.shape)


def rowwise_weight_gradient(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """The gradient [C, 1, kh, kw] by the kernels on a large map: the same along one axis alone.

    For each row of the kernel, a product [W, Wo] a channel of the input's rows with the output's that they
    meet; the taps of the row are sums along its diagonals.
    """
    (channels, _, kh, kw), (width, out_width) = weight.shape, (int(x.shape[3]), int(grad_output.shape[3]))
    pattern = _meets(kw, width, out_width, stride[1], padding[1], dilation[1], x).reshape(kw, -1)
    rows = functional.pad(x.transpose(0, 1), (0, 0, padding[0], padding[0]))
    outputs = grad_output.transpose(0, 1).reshape(channels, -1, out_width)
    taps = []
    for tap in range(kh):
        first = tap * dilation[0]
        met = rows[:, :, first : first + stride[0] * (int(grad_output.shape[2]) - 1) + 1 : stride[0]]
        by_column = met.reshape(channels, -1, width).transpose(1, 2) @ outputs
        taps.append(by_column.reshape(channels, -1) @ pattern.t())
    return torch.stack(taps, 1).reshape(weight.shape)


def _by_channel(x: Tensor) -> Tensor:
    """[B, C, H, W] to [C, B, H·W]."""
    return x.transpose(0, 1).flatten(2)
