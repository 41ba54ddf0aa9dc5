"""Max pooling by its taps: ExecuTorch's kernel for the gradient adds into memory that it never clears."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edge_export.executorch.activations import above_zero
from edge_export.executorch.taps import Window, batch_first, batch_last, put_back, taps, windows

aten = torch.ops.aten


def maximum(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """``aten.max_pool2d_with_indices``: values [B, C, Ho, Wo], and zeros in place of indices nobody reads."""
    pooled = batch_first(_largest(_taps(x, kernel, stride, padding, dilation, ceil_mode)))
    return pooled, torch.zeros(pooled.shape, dtype=torch.int64)


def maximum_backward(
    grad_output: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Its gradient [B, C, H, W]: of equal pixels the first gets it, as in PyTorch."""
    del indices
    seen = _taps(x, kernel, stride, padding, dilation, ceil_mode)
    largest, left = _largest(seen), batch_last(grad_output)
    parts = []
    for part in seen[:-1]:
        kept = left * above_zero(largest - part)
        parts.append(left - kept)
        left = kept
    windows = _windows(kernel, stride, padding, dilation, ceil_mode)
    return batch_first(put_back([*parts, left], *windows, (x.shape[2], x.shape[3])))


def _taps(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> list[Tensor]:
    return taps(batch_last(x), *_windows(kernel, stride, padding, dilation, ceil_mode), filler=-float("inf"))


def _largest(seen: list[Tensor]) -> Tensor:
    largest = seen[0]
    for part in seen[1:]:
        largest = torch.maximum(largest, part)
    return largest


def _windows(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Window, Window]:
    moves = (kernel, stride or kernel, padding, dilation)
    return windows(moves, ceil=ceil_mode)
