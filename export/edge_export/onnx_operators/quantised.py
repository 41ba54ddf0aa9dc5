"""Maps and weights of eight bits, between QuantizeLinear and DequantizeLinear.

ONNX Runtime makes an integer operator of a convolution or a Gemm whose operands are all dequantised. PyTorch
leaves the bias as it is: here it becomes an int32 at the scale of the products, as in XNNPACK.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the operators

from edge_export.errors import ExportError
from edge_export.onnx_operators import products
from edge_export.translator import Translator, Value

aten, quantised = torch.ops.aten, torch.ops.quantized_decomposed


OFFSET = 128
"""From the int8 of PyTorch's maps to uint8, of the same values, for which ONNX Runtime has fast kernels."""


def quantise(
    t: Translator, _: fx.Node, x: Value, scale: float, zero: int, low: int, high: int, dtype: torch.dtype
) -> str:
    """⌊x / scale⌉ + zero, where int8 saturates."""
    if dtype != torch.int8 or (low, high) != (-128, 127):
        raise ExportError(f"maps quantised to {low} … {high} in {dtype}: the translation knows int8 alone")
    while isinstance(x, fx.Node) and _says_the_same(x, scale, zero):
        x = x.args[0]  # type: ignore[assignment]
    return t.graph("QuantizeLinear", t.name(x), *_constants(t, scale, zero))


def _says_the_same(x: fx.Node, scale: float, zero: int) -> bool:
    """Whether int8 saturates where ``x`` clamps: a clamp in between would keep an operator from integers."""
    low: Any
    high: Any
    if x.target is aten.relu.default:
        low, high = 0, None
    elif x.target is aten.clamp.default:
        low, high = (*x.args[1:], None, None)[:2]
    else:
        return False
    lowest = low is None or round(low / scale) + zero <= -128
    return lowest and (high is None or round(high / scale) + zero >= 127)


def dequantise(t: Translator, _: fx.Node, x: Value, scale: float, zero: int, *__: Any, **___: Any) -> str:
    """(x − zero) · scale."""
    if t.is_constant(x):
        x = (t.constant_tensor(x).to(torch.int32) + OFFSET).to(torch.uint8)
    return t.graph("DequantizeLinear", t.name(x), *_constants(t, scale, zero))


def dequantise_by_channel(
    t: Translator, _: fx.Node, x: Value, scales: Value, zeros: Value, axis: int, *__: Any, **___: Any
) -> str:
    """The same with a scale for each index of ``axis``; weights have their zero at 0."""
    if t.constant_tensor(zeros).any():
        raise ExportError("weights quantised with a zero point: the translation knows symmetric ones alone")
    scale = t.constant_tensor(scales).float()
    return t.graph("DequantizeLinear", t.name(x), t.graph.constant(scale), axis=axis)


def convolution(
    t: Translator, node: fx.Node, x: fx.Node, weight: fx.Node, bias: Value | None, *rest: Any
) -> str:
    """A convolution; of eight bits, where its map and its weight are."""
    return products.convolution(t, node, x, weight, _bias(t, x, weight, bias), *rest)


def affine(t: Translator, node: fx.Node, bias: Value, a: fx.Node, b: fx.Node, **factors: float) -> str:
    """A product of matrices and a sum; of eight bits, where both matrices are."""
    turned = b.target is aten.permute.default and isinstance(b.args[0], fx.Node)
    return products.affine(t, node, _bias(t, a, b.args[0] if turned else b, bias), a, b, **factors)


def _bias(t: Translator, x: fx.Node, weight: Any, bias: Value | None) -> Any:
    """The bias as products of ``x`` and ``weight`` are summed, where both are dequantised; else as it is."""
    if x.target is not quantised.dequantize_per_tensor.default or not t.is_constant(bias):
        return bias
    if weight.target is not quantised.dequantize_per_channel.default or weight.args[3] != 0:
        return bias
    scale = float(x.args[1]) * t.constant_tensor(weight.args[1]).double()  # type: ignore[arg-type]
    whole = torch.round(t.constant_tensor(bias).double() / scale)
    if whole.abs().max() >= 1 << 31:  # a channel of weights next to 0
        return bias
    constants = (t.graph.constant(whole.to(torch.int32)), t.graph.constant(scale.float()))
    return t.graph("DequantizeLinear", *constants, axis=0)


def _constants(t: Translator, scale: float, zero: int) -> tuple[str, str]:
    return t.graph.constant(np.array(scale, np.float32)), t.graph.constant(np.array(zero + OFFSET, np.uint8))


TABLE: dict[Any, Callable[..., Any]] = {
    quantised.quantize_per_tensor.default: quantise,
    quantised.dequantize_per_tensor.default: dequantise,
    quantised.dequantize_per_channel.default: dequantise_by_channel,
    aten.convolution.default: convolution,
    aten.addmm.default: affine,
}
