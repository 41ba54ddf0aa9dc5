"""Gradients of padding that mirrors or repeats a map's edge, as two products with constant matrices.

Each axis of the padded map is a choice of pixels; a pixel's gradient is the sum over where it was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from edge_export.decompositions.pooling import one_hot


def mirrored(pixel: int, size: int) -> int:
    """The pixel that ``nn.ReflectionPad2d`` puts at a position before, in or behind an axis."""
    return size - 1 - abs(size - 1 - abs(pixel))


def nearest(pixel: int, size: int) -> int:
    """That of ``nn.ReplicationPad2d``."""
    return min(max(pixel, 0), size - 1)


def backward(chosen: Callable[[int, int], int]) -> Callable[[Tensor, Tensor, Sequence[int]], Tensor]:
    """``aten.*_pad2d_backward``: [B, C, H, W] from grad_output, x, and widths left, right, above, below."""

    def gradient(grad_output: Tensor, x: Tensor, widths: Sequence[int]) -> Tensor:
        left, right, above, below = widths
        rows, columns = (
            one_hot([chosen(pixel, size) for pixel in range(-before, size + behind)], size, x)
            for size, before, behind in (
                (int(x.shape[-2]), above, below),
                (int(x.shape[-1]), left, right),
            )
        )
        return rows.t() @ grad_output @ columns

    return gradient
