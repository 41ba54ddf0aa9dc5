"""Gradients of piecewise linear activations as products with 0 or 1, by operators that XNNPACK has."""

from __future__ import annotations

import torch
from torch import Tensor


def above_zero(x: Tensor) -> Tensor:
    """1 where ``x`` is above 0, else 0: comparisons are slow loops in ExecuTorch, clamping is not."""
    return torch.ceil(torch.clamp(x, 0.0, 1.0))


def threshold_backward(grad_output: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Gradient of ReLU: what comes where ``x`` is above the threshold."""
    return grad_output * above_zero(x if threshold == 0 else x - threshold)


def hardtanh_backward(grad_output: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Gradient of ReLU6 and Hardtanh: what comes where ``x`` lies between the bounds."""
    return grad_output * above_zero(torch.minimum(x if low == 0 else x - low, high - x))
