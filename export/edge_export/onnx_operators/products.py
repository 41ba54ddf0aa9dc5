"""Matrix products, convolutions, and the normalisations that ONNX has an operator for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from edge_export.translator import OperatorError, Translator, Value, dtype_of, sizes_of

aten = torch.ops.aten


def product(t: Translator, node: fx.Node, a: fx.Node, b: fx.Node) -> str:
    """A product of matrices, or of batches of them; a transposed operand goes into Gemm's flags."""
    first, second = _once(t, a), _once(t, b)
    if len(sizes_of(node)) == 2:
        (first, flip_a), (second, flip_b) = _untransposed(t, first), _untransposed(t, second)
        if flip_a or flip_b:
            return t.graph("Gemm", first, second, transA=flip_a, transB=flip_b)
    return t.graph("MatMul", first, second)


def _once(t: Translator, operand: fx.Node) -> str:
    """A constant that is the same for every product of a batch is one matrix, which MatMul repeats."""
    if t.is_constant(operand):
        constant = t.constant_tensor(operand)
        if constant.dim() > 2 and bool((constant == constant[:1]).all()):
            return t.graph.constant(constant[0])
    return t.name(operand)


def affine(
    t: Translator, _: fx.Node, bias: Value, a: fx.Node, b: fx.Node, *, beta: float = 1, alpha: float = 1
) -> str:
    """``beta * bias + alpha * a @ b``."""
    (first, flip_a), (second, flip_b) = _untransposed(t, t.name(a)), _untransposed(t, t.name(b))
    factors = {"alpha": float(alpha), "beta": float(beta)}
    return t.graph("Gemm", first, second, t.name(bias), transA=flip_a, transB=flip_b, **factors)


def _untransposed(t: Translator, name: str) -> tuple[str, int]:
    producer = t.graph.producer(name)
    turned = producer is not None and producer.op_type == "Transpose"
    if producer is not None and turned and list(producer.attribute[0].ints) == [1, 0]:
        return producer.input[0], 1
    return name, 0


def convolution(
    t: Translator,
    _: fx.Node,
    x: fx.Node,
    weight: fx.Node,
    bias: fx.Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    """Convolution over one axis or more, plain or transposed."""
    axes = len(sizes_of(x)) - 2
    inputs = [t.name(x), t.name(weight)] + ([] if bias is None else [t.name(bias)])
    attributes: dict[str, Any] = {
        "kernel_shape": [int(size) for size in sizes_of(weight)[2:]],
        "strides": _spread(stride, axes),
        "pads": _spread(padding, axes) * 2,
        "dilations": _spread(dilation, axes),
        "group": int(groups),
    }
    if transposed:
        return t.graph("ConvTranspose", *inputs, **attributes, output_padding=_spread(output_padding, axes))
    return t.graph("Conv", *inputs, **attributes)


def batch_norm(
    t: Translator,
    _: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mean: fx.Node,
    variance: fx.Node,
    momentum: float,
    eps: float,
) -> tuple[str, None, None]:
    """Batch normalisation by given statistics, one pass over the map."""
    del momentum

    def constant(value: float) -> str:  # by channel, of which there are as many as means
        channels = int(sizes_of(mean)[0])
        return t.name(torch.full((channels,), value, dtype=dtype_of(x)))

    scale = constant(1.0) if weight is None else t.name(weight)
    shift = constant(0.0) if bias is None else t.name(bias)
    inputs = (t.name(x), scale, shift, t.name(mean), t.name(variance))
    return t.graph("BatchNormalization", *inputs, epsilon=float(eps)), None, None


def batch_norm_functional(
    t: Translator,
    node: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mean: fx.Node,
    variance: fx.Node,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[str, None, None]:
    """The same by the name that PyTorch's modules use."""
    if training:
        raise OperatorError("aten.native_batch_norm in train mode")
    return batch_norm(t, node, x, weight, bias, mean, variance, momentum, eps)


def layer_norm(
    t: Translator,
    _: fx.Node,
    x: fx.Node,
    shape: Sequence[int],
    weight: fx.Node | None,
    bias: fx.Node | None,
    eps: float,
) -> tuple[str, str, str]:
    """Normalised over the last axes; with it, each row's mean and 1 / deviation, for the backward pass."""
    axes = t.graph.integers(*range(-len(shape), 0))
    name = t.name(x)
    mean = t.graph("ReduceMean", name, axes, keepdims=1)
    centred = t.graph("Sub", name, mean)
    inverse = _inverse_deviation(t, centred, axes, eps, dtype_of(x))
    result = t.graph("Mul", centred, inverse)
    if weight is not None:
        result = t.graph("Mul", result, t.name(weight))
    if bias is not None:
        result = t.graph("Add", result, t.name(bias))
    return result, mean, inverse


def group_norm(
    t: Translator,
    _: fx.Node,
    x: fx.Node,
    weight: fx.Node | None,
    bias: fx.Node | None,
    batch: Any,
    channels: int,
    pixels: int,
    groups: int,
    eps: float,
) -> tuple[str, str, str]:
    """Normalised over each group of channels; with it, each group's mean and 1 / deviation, [B, groups]."""
    del batch
    sizes = sizes_of(x)
    axes = t.graph.integers(2)
    grouped = t.reshaped(t.name(x), [sizes[0], groups, int(channels) * int(pixels) // groups])
    mean = t.graph("ReduceMean", grouped, axes, keepdims=1)
    centred = t.graph("Sub", grouped, mean)
    inverse = _inverse_deviation(t, centred, axes, eps, dtype_of(x))
    result = t.reshaped(t.graph("Mul", centred, inverse), sizes)
    column = [int(channels)] + [1] * (len(sizes) - 2)
    if weight is not None:
        result = t.graph("Mul", result, t.reshaped(t.name(weight), column))
    if bias is not None:
        result = t.graph("Add", result, t.reshaped(t.name(bias), column))
    return result, t.reshaped(mean, [sizes[0], groups]), t.reshaped(inverse, [sizes[0], groups])


def _inverse_deviation(t: Translator, centred: str, axes: str, eps: float, dtype: torch.dtype) -> str:
    variance = t.graph("ReduceMean", t.graph("Mul", centred, centred), axes, keepdims=1)
    shifted = t.graph("Add", variance, t.graph.constant(np.array(eps, np.dtype(str(dtype).split(".")[1]))))
    return t.graph("Reciprocal", t.graph("Sqrt", shifted))


def _spread(values: Sequence[int], axes: int) -> list[int]:
    return [int(value) for value in (values if len(values) == axes else [values[0]] * axes)]


TABLE: dict[Any, Callable[..., Any]] = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.matmul.default: product,
    aten._native_batch_norm_legit_no_training.default: batch_norm,
    aten.native_batch_norm.default: batch_norm_functional,
    aten.native_layer_norm.default: layer_norm,
    aten.native_group_norm.default: group_norm,
}
