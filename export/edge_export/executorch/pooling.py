"""Max pooling by its taps: ExecuTorch's kernel for the gradient adds into memory that it never clears."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from edge_export.executorch.activations import above_zero
from edge_export.executorch.taps import batch_first, batch_last, put_back, taps
from edge_export.windows import windows

OUTSIDE = -float("inf")
"""What lies around a map."""


def maximum(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """``aten.max_pool2d_with_indices``: values [B, C, Ho, Wo], and zeros in place of indices nobody reads."""
    both = windows((kernel, stride or kernel, padding, dilation), ceil=ceil_mode)
    pooled = batch_first(reduce(torch.maximum, taps(batch_last(x), *both, filler=OUTSIDE)))
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
    both = windows((kernel, stride or kernel, padding, dilation), ceil=ceil_mode)
    seen = taps(batch_last(x), *both, filler=OUTSIDE)
    largest, left = reduce(torch.maximum, seen), batch_last(grad_output)
    parts = []
    for part in seen[:-1]:
        kept = left * above_zero(largest - part)
        parts.append(left - kept)
        left = kept
    return batch_first(put_back([*parts, left], *both, (x.shape[2], x.shape[3])))
