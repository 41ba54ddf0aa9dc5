"""Max pooling in ONNX operators: the indices are ONNX's, which count over the whole tensor.

PyTorch's count within one map. Only the backward pass reads them, so the two never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from onnxscript import opset18 as op

Value = Any  # onnxscript's symbolic tensors have no type of their own while a graph is built

_constant = cast(Callable[..., Value], op.Constant)


def max_pool(
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> Value:
    """``aten.max_pool2d_with_indices``: [B, C, H, W] to values and indices [B, C, Ho, Wo]."""
    return op.MaxPool(
        x,
        kernel_shape=_pair(kernel),
        strides=_pair(stride or kernel),
        pads=_pair(padding) * 2,
        dilations=_pair(dilation),
        ceil_mode=int(ceil_mode),
    )


def max_pool_backward(
    grad_output: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Value,
) -> Value:
    """Gradient [B, C, H, W]: each output's goes to the input that was its largest.

    Where windows overlap one input may serve several outputs, and what they give has to be added up;
    where they do not, MaxUnpool is the faster way to say it.
    """
    k, s = _pair(kernel), _pair(stride or kernel)
    plain = _pair(padding) == [0, 0] and _pair(dilation) == [1, 1] and not ceil_mode
    if plain and s[0] >= k[0] and s[1] >= k[1]:
        return op.MaxUnpool(grad_output, indices, op.Shape(x), kernel_shape=k, strides=s)
    flat = _constant(value_ints=[-1])
    zeros = op.Expand(op.CastLike(_constant(value_floats=[0.0]), x), op.Reshape(op.Size(x), flat))
    added = op.ScatterElements(
        zeros, op.Reshape(indices, flat), op.Reshape(grad_output, flat), axis=0, reduction="add"
    )
    return op.Reshape(added, op.Shape(x))


def _pair(values: Sequence[int]) -> list[int]:
    return [int(value) for value in (values if len(values) == 2 else (values[0], values[0]))]


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.max_pool2d_with_indices.default: max_pool,
    torch.ops.aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
