"""Average pooling as two matrix products, adaptive max pooling as an ordinary one.

Average pooling is linear and separable: ``rows @ x @ columns.T`` with one constant matrix for each axis,
whose row o holds the share that each input takes in output o. One statement covers overlapping windows,
padding, counted or not, and adaptive sizes that do not divide the map. Its gradient is their transposes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edge_export.errors import ExportError
from edge_export.windows import Window

aten = torch.ops.aten


def window_shares(
    size: int, out: int, kernel: int, stride: int, padding: int, count_padding: bool, like: Tensor
) -> Tensor:
    """The matrix [out, size] of average pooling along one axis, in the dtype of ``like``.

    Args:
        size: extent of the input.
        out: extent of the output.
        kernel: extent of a window.
        stride: from one window's start to the next one's.
        padding: zeros before and after the input.
        count_padding: divide by the window's extent, padding included, rather than by the inputs in it.
        like: gives dtype and device.
    """
    shares = [[0.0] * size for _ in range(out)]
    for o, row in enumerate(shares):
        start = o * stride - padding
        padded_end = min(start + kernel, size + padding)
        inside = range(max(start, 0), min(padded_end, size))
        count = padded_end - start if count_padding else len(inside)
        for i in inside:
            row[i] = 1 / count
    return torch.tensor(shares, dtype=like.dtype, device=like.device)


def adaptive_window(o: int, size: int, out: int) -> range:
    """The inputs that output ``o`` of ``out`` takes."""
    return range(o * size // out, -(-(o + 1) * size // out))


def adaptive_shares(size: int, out: int, like: Tensor) -> Tensor:
    """The matrix [out, size] of adaptive average pooling along one axis: windows floor to ceiling."""
    shares = [[0.0] * size for _ in range(out)]
    for o, row in enumerate(shares):
        window = adaptive_window(o, size, out)
        for i in window:
            row[i] = 1 / len(window)
    return torch.tensor(shares, dtype=like.dtype, device=like.device)


def average(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """``aten.avg_pool2d``: [B, C, H, W] to [B, C, Ho, Wo]."""
    rows, columns = _matrices(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return rows @ x @ columns.t()


def average_backward(
    grad_output: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Gradient of :func:`average`: [B, C, Ho, Wo] to [B, C, H, W]."""
    rows, columns = _matrices(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return rows.t() @ grad_output @ columns


def adaptive_average(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """``aten._adaptive_avg_pool2d``: [B, C, H, W] to [B, C, *output_size]."""
    rows, columns = (
        adaptive_shares(int(n), int(o), x) for n, o in zip(x.shape[-2:], output_size, strict=True)
    )
    return rows @ x @ columns.t()


def adaptive_average_backward(grad_output: Tensor, x: Tensor) -> Tensor:
    """Gradient of :func:`adaptive_average`: [B, C, Ho, Wo] to [B, C, H, W]."""
    sizes = zip(x.shape[-2:], grad_output.shape[-2:], strict=True)
    rows, columns = (adaptive_shares(int(n), int(o), x) for n, o in sizes)
    return rows.t() @ grad_output @ columns


def adaptive_maximum(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``aten.adaptive_max_pool2d``: [B, C, H, W] to values and indices [B, C, *output_size].

    The windows are laid side by side, short ones with their last row or column again. That is after the
    original, so that the first of equal pixels, which gets the gradient, stays the first.
    """
    windows, kernel = _side_by_side(x, output_size)
    pooled: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices(windows, kernel)
    return pooled


def adaptive_maximum_backward(grad_output: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """Gradient of :func:`adaptive_maximum`: [B, C, Ho, Wo] to [B, C, H, W]."""
    windows, kernel = _side_by_side(x, grad_output.shape[-2:])
    grad: Tensor = aten.max_pool2d_with_indices_backward(
        grad_output, windows, kernel, kernel, [0, 0], [1, 1], False, indices
    )
    if grad.shape[2] != x.shape[2]:
        grad = one_hot(_pixels(x.shape[2], grad_output.shape[2]), x.shape[2], x).t() @ grad
    if grad.shape[3] != x.shape[3]:
        grad = grad @ one_hot(_pixels(x.shape[3], grad_output.shape[3]), x.shape[3], x)
    return grad


def _side_by_side(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Maps on which adaptive windows are disjoint ones of one size, and that size."""
    rows, columns = (_pixels(size, out) for size, out in zip(x.shape[-2:], output_size, strict=True))
    kernel = [len(axis) // int(out) for axis, out in zip((rows, columns), output_size, strict=True)]
    if len(rows) != x.shape[2]:
        x = x[:, :, torch.tensor(rows, device=x.device)]
    if len(columns) != x.shape[3]:
        x = x[:, :, :, torch.tensor(columns, device=x.device)]
    return x, kernel


def _pixels(size: int, out: int) -> list[int]:
    """The pixels along one axis of every adaptive window in turn, all windows as long as the longest."""
    windows = [adaptive_window(o, int(size), int(out)) for o in range(int(out))]
    longest = max(map(len, windows))
    return [window[min(i, len(window) - 1)] for window in windows for i in range(longest)]


def one_hot(pixels: list[int], size: int, like: Tensor) -> Tensor:
    """The matrix [len(pixels), size] that takes those out of an axis."""
    return torch.eye(int(size), dtype=like.dtype, device=like.device)[pixels]


def _matrices(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> list[Tensor]:
    if divisor_override is not None:
        raise ExportError("average pooling with divisor_override is not covered: leave it out")
    matrices = []
    for size, k, s, p in zip(x.shape[-2:], kernel, stride or kernel, padding, strict=True):
        out = Window(k, s, p, ceil=ceil_mode).out(int(size))
        matrices.append(window_shares(int(size), out, k, s, p, count_include_pad, x))
    return matrices
