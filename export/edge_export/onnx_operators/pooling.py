"""Max pooling in ONNX operators: the indices are ONNX's, which count over the whole tensor.

PyTorch's count within one map. Only the backward pass reads them, so the two never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from edge_export.translator import Translator, dtype_of, sizes_of

aten = torch.ops.aten


def max_pool(
    t: Translator,
    node: fx.Node,
    x: fx.Node,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> list[str]:
    """``aten.max_pool2d_with_indices``: [B, C, H, W] to values and indices [B, C, Ho, Wo]."""
    read = {user.args[1] for user in node.users}
    return t.graph.emit(
        "MaxPool",
        [t.name(x)],
        2 if 1 in read else 1,  # with indices it takes five times as long
        kernel_shape=_pair(kernel),
        strides=_pair(stride or kernel),
        pads=_pair(padding) * 2,
        dilations=_pair(dilation),
        ceil_mode=int(ceil_mode),
    )


def max_pool_backward(
    t: Translator,
    node: fx.Node,
    grad_output: fx.Node,
    x: fx.Node,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: fx.Node,
) -> str:
    """Gradient [B, C, H, W]: each output's goes to the input that was its largest.

    Where windows overlap one input may serve several outputs, and what they give has to be added up;
    where they do not, MaxUnpool is the faster way to say it.
    """
    k, s = _pair(kernel), _pair(stride or kernel)
    shape = t.exact_shape(sizes_of(x))
    plain = _pair(padding) == [0, 0] and _pair(dilation) == [1, 1] and not ceil_mode
    if plain and s[0] >= k[0] and s[1] >= k[1]:
        return t.graph("MaxUnpool", t.name(grad_output), t.name(indices), shape, kernel_shape=k, strides=s)
    flat = t.graph.integers(-1)
    size = t.graph("ReduceProd", shape, keepdims=1)
    zeros = t.graph("Expand", t.name(0.0, dtype_of(node)), size)
    added = t.graph(
        "ScatterElements",
        zeros,
        t.graph("Reshape", t.name(indices), flat),
        t.graph("Reshape", t.name(grad_output), flat),
        axis=0,
        reduction="add",
    )
    return t.graph("Reshape", added, t.shape(sizes_of(x)))


def _pair(values: Sequence[int]) -> list[int]:
    return [int(value) for value in (values if len(values) == 2 else (values[0], values[0]))]


TABLE: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
