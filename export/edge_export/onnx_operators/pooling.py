"""Max pooling in ONNX operators: the indices are ONNX's, which count over the whole tensor.

PyTorch's count within one map. Only the backward pass reads them, so the two never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from edge_export.onnx_graph import onnx_type
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
    by_indices = 1 in read and not is_tiling(x, kernel, stride, padding, dilation)
    pooled = t.graph.emit(
        "MaxPool",
        [t.name(x)],
        2 if by_indices else 1,
        kernel_shape=_pair(kernel),
        strides=_pair(stride or kernel),
        pads=_pair(padding) * 2,
        dilations=_pair(dilation),
        ceil_mode=int(ceil_mode),
    )
    return pooled if by_indices else [pooled[0], ""]


def max_pool_backward(
    t: Translator,
    node: fx.Node,
    grad_output: fx.Node,
    x: fx.Node,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    _: bool,
    indices: fx.Node,
) -> str:
    """Gradient [B, C, H, W]: each output's goes to the first input of its window that is the largest."""
    window = _pair(kernel)
    if is_tiling(x, kernel, stride, padding, dilation):
        return _unpool_tiles(t, node, t.name(grad_output), t.name(x), window)
    return _unpool_by_indices(t, node, t.name(grad_output), x, t.name(indices))


def is_tiling(
    x: fx.Node,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """Whether the windows cover the map, each pixel once."""
    window = _pair(kernel)
    divides = all(int(size) % k == 0 for size, k in zip(sizes_of(x)[2:], window, strict=True))
    return (
        _pair(stride or kernel) == window
        and _pair(padding) == [0, 0]
        and _pair(dilation) == [1, 1]
        and divides
    )


def _unpool_tiles(t: Translator, node: fx.Node, grad_output: str, x: str, window: list[int]) -> str:
    """Without indices, with which ONNX Runtime's MaxPool takes 25 times as long.

    An input that equals its window's largest gets its rank in the window, counted down from the first;
    the one of highest rank is the first.
    """
    dtype = dtype_of(node)
    kind, (height, width) = onnx_type(dtype), window
    scales = t.graph.constant(np.array([1, 1, height, width], np.float32))

    def pooled(name: str) -> str:
        return t.graph.emit("MaxPool", [name], 1, kernel_shape=window, strides=window)[0]

    def spread(name: str) -> str:
        return t.graph(
            "Resize",
            name,
            "",
            scales,
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )

    rows, columns = (int(size) for size in sizes_of(node)[2:])
    ranks = torch.arange(height * width, 0, -1).reshape(height, width)
    ranks = ranks.tile(rows // height, columns // width).to(dtype)
    largest = t.graph("Cast", t.graph("Equal", x, spread(pooled(x))), to=kind)
    ranked = t.graph("Mul", largest, t.graph.constant(ranks))
    first = t.graph("Cast", t.graph("Equal", ranked, spread(pooled(ranked))), to=kind)
    return t.graph("Mul", first, spread(grad_output))


def _unpool_by_indices(t: Translator, node: fx.Node, grad_output: str, x: fx.Node, indices: str) -> str:
    """For windows that overlap: what one input gets from several outputs is added up."""
    flat = t.graph.integers(-1)
    size = t.graph("ReduceProd", t.exact_shape(sizes_of(x)), keepdims=1)
    zeros = t.graph("Expand", t.name(0.0, dtype_of(node)), size)
    added = t.graph(
        "ScatterElements",
        zeros,
        t.graph("Reshape", indices, flat),
        t.graph("Reshape", grad_output, flat),
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
