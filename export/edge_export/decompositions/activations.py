"""Backward passes of piecewise linear activations, as a product with 0 or 1.

ONNX Runtime's Where takes four times as long as a cast and a product.
"""

from __future__ import annotations

from torch import Tensor


def threshold_backward(grad_output: Tensor, x: Tensor, threshold: float) -> Tensor:
    """Gradient of ReLU: what comes where ``x`` is above the threshold. All tensors of one shape."""
    return grad_output * (x > threshold).to(grad_output.dtype)


def hardtanh_backward(grad_output: Tensor, x: Tensor, low: float, high: float) -> Tensor:
    """Gradient of ReLU6 and Hardtanh: what comes where ``x`` lies between the bounds."""
    return grad_output * (x > low).to(grad_output.dtype) * (x < high).to(grad_output.dtype)
