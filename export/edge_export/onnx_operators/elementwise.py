"""Operators that work element by element, with broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnx import numpy_helper
from torch import Tensor, fx

from edge_export.translator import Translator, Value, dtype_of, same_sizes, sizes_of

aten = torch.ops.aten

SHORT = 128
"""Numbers in a row up to which it costs more to begin one than to work on it."""


def narrow(t: Translator, value: Value, other: Value, result: fx.Node) -> Value:
    """``value`` before it was expanded, where the other operand brings the result to its shape anyway."""
    while isinstance(value, fx.Node) and value.target is aten.expand.default:
        source = value.args[0]
        assert isinstance(source, fx.Node)
        if t.is_constant(value) or not _broadcasts_to(sizes_of(source), sizes_of(other), sizes_of(result)):
            return value
        value = source
    return value


def _broadcasts_to(a: list[Any], b: list[Any], result: list[Any]) -> bool:
    rank = len(result)
    if max(len(a), len(b)) != rank:
        return False
    a, b = [1] * (rank - len(a)) + a, [1] * (rank - len(b)) + b
    return all(
        same_sizes([x if same_sizes([y], [1]) else y], [r]) for x, y, r in zip(a, b, result, strict=True)
    )


def binary(op: str) -> Callable[..., str]:
    """An arithmetic operator; ``alpha`` scales the second operand."""

    def translate(t: Translator, node: fx.Node, a: Value, b: Value, alpha: float = 1) -> str:
        a, b = narrow(t, a, b, node), narrow(t, b, a, node)
        dtype = dtype_of(node)
        first, second = t.name(a, dtype), t.name(b, dtype)
        if alpha != 1:
            second = t.graph("Mul", second, t.name(alpha, dtype))
        first, second = _over_rows(t, a, first, node), _over_rows(t, b, second, node)
        return _without_trailing_ones(t, op, (a, first), (b, second), node)

    return translate


def _over_rows(t: Translator, value: Value, name: str, node: fx.Node) -> str:
    """An operand that is repeated before and behind its axes, along those behind where they are short.

    ONNX Runtime works row by row then, and not by pieces of a few numbers.
    """
    sizes, result = sizes_of(value), sizes_of(node)
    behind = len(sizes) - next(
        (i for i, size in enumerate(reversed(sizes)) if not same_sizes([size], [1])), 0
    )
    pixels = [int(size) for size in result[behind:] if isinstance(size, int)]
    repeated = len(sizes) == len(result) and not same_sizes(sizes[:1], result[:1])
    if not repeated or len(pixels) < len(result) - behind or not 1 < math.prod(pixels) < SHORT:
        return name
    return t.graph("Expand", name, t.exact_shape([*sizes[:behind], *pixels]))


def _without_trailing_ones(
    t: Translator, op: str, a: tuple[Value, str], b: tuple[Value, str], node: fx.Node
) -> str:
    """``op`` without the last axes of extent 1, over which ONNX Runtime would loop a hundred times slower."""
    sizes = sizes_of(node)
    ones = 0
    while ones < len(sizes) and same_sizes([sizes[-1 - ones]], [1]):
        ones += 1
    if not ones or ones == len(sizes):
        return t.graph(op, a[1], b[1])
    short = [
        name if len(sizes_of(value)) == 0 else t.reshaped(name, sizes_of(value)[:-ones] or [1])
        for value, name in (a, b)
    ]
    result = t.graph(op, *short)
    t.know(result, sizes[:-ones])
    return t.reshaped(result, sizes)


def comparison(op: str) -> Callable[..., str]:
    """Two operands of one dtype to a truth value."""

    def translate(t: Translator, node: fx.Node, a: Value, b: Value) -> str:
        a, b = narrow(t, a, b, node), narrow(t, b, a, node)
        dtype = torch.result_type(_example(a), _example(b))
        first, second = t.name(a, dtype), t.name(b, dtype)
        return t.graph("Not", t.graph("Equal", first, second)) if op == "Not" else t.graph(op, first, second)

    return translate


def logical(op: str) -> Callable[..., str]:
    """Two truth values, or numbers that are true where they are not 0."""

    def translate(t: Translator, _: fx.Node, a: Value, b: Value) -> str:
        return t.graph(op, t.name(a, torch.bool), t.name(b, torch.bool))

    return translate


def unary(*ops: str) -> Callable[..., str]:
    """One operand through ``ops`` one after the other."""

    def translate(t: Translator, node: fx.Node, x: Value) -> str:
        name = t.name(x, dtype_of(node))
        for op in ops:
            name = t.graph(op, name)
        return name

    return translate


def same(t: Translator, _: fx.Node, x: fx.Node, **__: Any) -> str:
    """A copy or an alias: in ONNX no value is ever overwritten."""
    return t.name(x)


def cast(t: Translator, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> str:
    """To the dtype of ``node``; a comparison with a number that becomes 0 or 1 is one operator."""
    if x.target in (aten.gt.Scalar, aten.lt.Scalar) and dtype_of(node) == torch.float32:
        compared, bound = x.args
        if dtype_of(compared) == torch.float32:  # type: ignore[arg-type]
            return _step(t, t.name(compared), float(bound), x.target is aten.gt.Scalar)  # type: ignore[arg-type]
    return t.name(x, dtype_of(node))


def _step(t: Translator, name: str, bound: float, above: bool) -> str:
    """1 where ``name`` lies above ``bound`` (or below), 0 at the bound and elsewhere.

    HardSigmoid, max(0, min(1, slope · x + offset)), is that at a slope so steep that the next number after
    the bound is beyond 1; a comparison and a cast take half as long again, many times on small maps.
    """
    slope = 2.0**127 if bound == 0 else 2.0**100
    sign = 1.0 if above else -1.0
    return t.graph("HardSigmoid", name, alpha=sign * slope, beta=-sign * slope * bound)


def power(t: Translator, node: fx.Node, x: Value, exponent: Value) -> str:
    """A square is a product, which is faster and exact."""
    name = t.name(x, dtype_of(node))
    if exponent == 2:
        return t.graph("Mul", name, name)
    if exponent == 0.5:
        return t.graph("Sqrt", name)
    if exponent == -0.5:
        return t.graph("Reciprocal", t.graph("Sqrt", name))
    if exponent == 1:
        return name
    return t.graph("Pow", name, t.name(exponent, dtype_of(node)))


def where(t: Translator, node: fx.Node, condition: Value, a: Value, b: Value) -> str:
    """``a`` where the condition holds, else ``b``."""
    a, b = narrow(t, a, condition, node), narrow(t, b, condition, node)
    return t.graph(
        "Where", t.name(condition, torch.bool), t.name(a, dtype_of(node)), t.name(b, dtype_of(node))
    )


def clamp(t: Translator, node: fx.Node, x: Value, low: float | None = None, high: float | None = None) -> str:
    """Numbers as bounds."""
    dtype = dtype_of(node)
    bounds = ["" if bound is None else t.name(bound, dtype) for bound in (low, high)]
    return _activated(t, node, "Clip", t.name(x, dtype), *(bounds if bounds[1] else bounds[:1]))


def relu(t: Translator, node: fx.Node, x: fx.Node) -> str:
    """0 below 0."""
    return _activated(t, node, "Relu", t.name(x))


def _activated(t: Translator, node: fx.Node, op: str, name: str, *bounds: str) -> str:
    """``op``, of a convolution that is reshaped right behind it, where ONNX Runtime makes the two one."""
    reshape = t.graph.producer(name)
    if reshape is not None and reshape.op_type == "Reshape":
        convolution = t.graph.producer(reshape.input[0])
        if convolution is not None and convolution.op_type == "Conv":
            return t.reshaped(t.graph(op, reshape.input[0], *bounds), sizes_of(node))
    return t.graph(op, name, *bounds)


def hardtanh(t: Translator, node: fx.Node, x: Value, low: float = -1.0, high: float = 1.0) -> str:
    """ReLU6 is this between 0 and 6."""
    return clamp(t, node, x, low, high)


def leaky_relu(t: Translator, _: fx.Node, x: Value, slope: float = 0.01) -> str:
    """One ONNX operator."""
    return t.graph("LeakyRelu", t.name(x), alpha=float(slope))


def elu(
    t: Translator, node: fx.Node, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> str:
    """scale · (x above 0, alpha · (exp(input_scale · x) − 1) below)."""
    name = t.name(x)
    zero = t.name(0.0, dtype_of(node))
    above = t.graph("Max", name, zero)
    inner = t.graph("Mul", t.graph("Min", name, zero), t.name(float(input_scale), dtype_of(node)))
    below = t.graph("Sub", t.graph("Exp", inner), t.name(1.0, dtype_of(node)))
    both = t.graph("Add", above, t.graph("Mul", below, t.name(float(alpha), dtype_of(node))))
    return t.graph("Mul", both, t.name(float(scale), dtype_of(node)))


def gelu(t: Translator, node: fx.Node, x: Value, *, approximate: str = "none") -> str:
    """Hendrycks and Gimpel, arXiv 1606.08415: x Φ(x), exact or by tanh."""
    name, dtype = t.name(x), dtype_of(node)

    def times(a: str, factor: float) -> str:
        return t.graph("Mul", a, t.name(factor, dtype))

    if approximate == "tanh":
        cube = t.graph("Mul", t.graph("Mul", name, name), name)
        inner = times(t.graph("Add", name, times(cube, 0.044715)), 0.7978845608028654)
        bent = t.graph("Tanh", inner)
    else:
        bent = t.graph("Erf", times(name, 0.7071067811865476))
    return t.graph("Mul", times(name, 0.5), t.graph("Add", bent, t.name(1.0, dtype)))


def expm1(t: Translator, node: fx.Node, x: Value) -> str:
    """exp(x) − 1."""
    return t.graph("Sub", t.graph("Exp", t.name(x)), t.name(1.0, dtype_of(node)))


def log1p(t: Translator, node: fx.Node, x: Value) -> str:
    """log(1 + x)."""
    return t.graph("Log", t.graph("Add", t.name(x), t.name(1.0, dtype_of(node))))


def full(t: Translator, node: fx.Node, *args: Any, **_: Any) -> str:
    """One value in a shape that depends on the batch; ``full_like`` gives a tensor in place of the sizes."""
    value = args[1] if len(args) > 1 else 0
    fill = torch.tensor([value], dtype=dtype_of(node)).numpy()
    shape = t.exact_shape(sizes_of(node))
    return t.graph("ConstantOfShape", shape, value=numpy_helper.from_array(fill))


def _example(value: Value) -> Any:
    tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    if isinstance(tensor, Tensor):
        return torch.empty([1] * tensor.dim(), dtype=tensor.dtype)
    return tensor if isinstance(tensor, (int, float, bool)) else 1


TABLE: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: binary("Add"),
    aten.add.Scalar: binary("Add"),
    aten.sub.Tensor: binary("Sub"),
    aten.sub.Scalar: binary("Sub"),
    aten.mul.Tensor: binary("Mul"),
    aten.mul.Scalar: binary("Mul"),
    aten.div.Tensor: binary("Div"),
    aten.div.Scalar: binary("Div"),
    aten.maximum.default: binary("Max"),
    aten.minimum.default: binary("Min"),
    aten.pow.Tensor_Scalar: power,
    aten.pow.Tensor_Tensor: binary("Pow"),
    **{
        overload: comparison(op)
        for packet, op in (
            (aten.eq, "Equal"),
            (aten.ne, "Not"),
            (aten.lt, "Less"),
            (aten.le, "LessOrEqual"),
            (aten.gt, "Greater"),
            (aten.ge, "GreaterOrEqual"),
        )
        for overload in (packet.Tensor, packet.Scalar)
    },
    aten.logical_and.default: logical("And"),
    aten.logical_or.default: logical("Or"),
    aten.bitwise_and.Tensor: logical("And"),
    aten.bitwise_or.Tensor: logical("Or"),
    aten.logical_not.default: unary("Not"),
    aten.bitwise_not.default: unary("Not"),
    aten.abs.default: unary("Abs"),
    aten.ceil.default: unary("Ceil"),
    aten.cos.default: unary("Cos"),
    aten.erf.default: unary("Erf"),
    aten.exp.default: unary("Exp"),
    aten.floor.default: unary("Floor"),
    aten.log.default: unary("Log"),
    aten.neg.default: unary("Neg"),
    aten.reciprocal.default: unary("Reciprocal"),
    aten.relu.default: relu,
    aten.rsqrt.default: unary("Sqrt", "Reciprocal"),
    aten.sigmoid.default: unary("Sigmoid"),
    aten.sign.default: unary("Sign"),
    aten.sin.default: unary("Sin"),
    aten.sqrt.default: unary("Sqrt"),
    aten.tanh.default: unary("Tanh"),
    aten.alias.default: same,
    aten.clone.default: same,
    aten.detach.default: same,
    aten.lift_fresh_copy.default: same,
    aten._to_copy.default: cast,
    torch.ops.prims.convert_element_type.default: cast,
    aten.where.self: where,
    aten.clamp.default: clamp,
    aten.hardtanh.default: hardtanh,
    aten.leaky_relu.default: leaky_relu,
    aten.elu.default: elu,
    aten.gelu.default: gelu,
    aten.expm1.default: expm1,
    aten.log1p.default: log1p,
    aten.full.default: full,
    aten.full_like.default: full,
    aten.zeros.default: full,
    aten.empty.memory_format: full,  # in ONNX all memory is filled
}
