"""From a traced graph of aten operators to an ONNX graph, operator by operator.

What depends on no input is computed here and now; what only renames (an alias, a view of the same shape)
costs nothing; a shape holds at most one unknown, the batch, which ONNX's Reshape infers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from edge_export.errors import ExportError
from edge_export.onnx_graph import OnnxGraph, onnx_type

Value: TypeAlias = fx.Node | Tensor | float | int | bool
"""A tensor of the traced graph, a constant, or a Python number (a node of a symbolic size included)."""


class OperatorError(ExportError):
    """An operator that ``where`` does not have, or no backward pass in the table of decompositions."""

    def __init__(self, operator: str, where: str = "the export") -> None:
        super().__init__(f"{operator} is not covered by {where}: use another layer in its place")
        self.operator = operator


class Translator:
    """Translates one traced graph.

    Attributes:
        graph: the ONNX graph so far.
    """

    def __init__(self, batch_input: str, table: Mapping[OpOverload[..., Any], Callable[..., Any]]) -> None:
        self.graph = OnnxGraph()
        self._batch_input = batch_input
        self._table = table
        self._values: dict[fx.Node, Any] = {}
        self._sizes: dict[str, Sequence[int | torch.SymInt]] = {}

    def bind(self, node: fx.Node, name: str) -> None:
        """Let the placeholder ``node`` be the graph input ``name``."""
        self._values[node] = name
        self._sizes[name] = sizes_of(node)

    def translate(self, node: fx.Node, attributes: fx.GraphModule) -> None:
        """Emit what computes ``node``, whose arguments have been translated."""
        if node.op == "get_attr":
            self._values[node] = getattr(attributes, str(node.target)).detach()
        elif isinstance(node.target, OpOverload):
            found = self._values[node] = self._operator(node, node.target)
            if isinstance(found, str):
                self._sizes.setdefault(found, sizes_of(node))
        elif node.target is operator.getitem:
            sequence, index = node.args
            self._values[node] = self._values[sequence][index]  # type: ignore[index]
        else:  # arithmetic on sizes, which shapes are read from
            self._values[node] = None

    def _operator(self, node: fx.Node, target: OpOverload[..., Any]) -> Any:
        if isinstance(node.meta["val"], (torch.SymInt, int)):
            return None
        if torch.Tag.nondeterministic_seeded in target.tags:
            raise ExportError(
                f"the model draws random numbers ({str(target).rsplit('.', 1)[0]}), which would be the same "
                "in every session: use nn.Dropout, whose noise is an input"
            )
        constants = fx.node.map_arg((node.args, node.kwargs), self._constant)
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(constants) if leaf is _Unknown]
        # A constant of eight bits is to stay one: it is dequantised on the device.
        if not leaves and not _is_symbolic(node.meta["val"]) and target.namespace != "quantized_decomposed":
            args, kwargs = constants
            return target(*args, **kwargs)
        if target not in self._table:
            raise OperatorError(str(target).rsplit(".", 1)[0])
        return self._table[target](self, node, *node.args, **node.kwargs)

    def _constant(self, node: fx.Node) -> Any:
        value = self._values[node]
        if isinstance(value, Tensor):
            return value
        size = node.meta["val"]
        return int(size) if value is None and not _is_symbolic(size) else _Unknown

    def is_constant(self, value: object) -> bool:
        """Whether ``value`` is a tensor known at the export."""
        return isinstance(value, Tensor) or (
            isinstance(value, fx.Node) and isinstance(self._values[value], Tensor)
        )

    def constant_tensor(self, value: object) -> Tensor:
        """The tensor of a value for which :meth:`is_constant` holds."""
        found = self._values[value] if isinstance(value, fx.Node) else value
        assert isinstance(found, Tensor)
        return found

    def name(self, value: Value, dtype: torch.dtype | None = None) -> str:
        """Name of ``value`` in the ONNX graph, in ``dtype`` where one is given."""
        found: Any = self._values[value] if isinstance(value, fx.Node) else value
        if found is None:
            found = self._size(value.meta["val"], dtype or torch.int64)  # type: ignore[union-attr]
        if isinstance(found, (bool, int, float)):
            found = torch.tensor(found, dtype=dtype)
        if isinstance(found, Tensor):
            return self.graph.constant(found if dtype is None else found.to(dtype))
        assert isinstance(found, str)
        if dtype is not None and isinstance(value, fx.Node) and dtype_of(value) != dtype:
            return self.graph("Cast", found, to=onnx_type(dtype))
        return found

    def shape(self, sizes: Sequence[int | torch.SymInt]) -> str:
        """Name of a shape for Reshape: the one unknown size is -1, which is inferred."""
        if sum(_is_symbolic(size) for size in sizes) > 1:
            raise ExportError("a tensor of the model has two axes that depend on the batch")
        return self.graph.integers(*(-1 if _is_symbolic(size) else int(size) for size in sizes))

    def exact_shape(self, sizes: Sequence[int | torch.SymInt]) -> str:
        """Name of a shape for Expand and the like, which infer nothing."""
        if not any(_is_symbolic(size) for size in sizes):
            return self.graph.integers(*(int(size) for size in sizes))
        parts = [
            self.graph("Reshape", self._size(size, torch.int64), self.graph.integers(1))
            if _is_symbolic(size)
            else self.graph.integers(int(size))
            for size in sizes
        ]
        return self.graph("Concat", *parts, axis=0)

    def reshaped(self, name: str, sizes: Sequence[int | torch.SymInt]) -> str:
        """``name`` in another shape; of a reshape of a reshape the last alone is left, or none."""
        producer = self.graph.producer(name)
        if producer is not None and producer.op_type == "Reshape":
            name = producer.input[0]
        if name in self._sizes and same_sizes(self._sizes[name], sizes):
            return name
        result = self.graph("Reshape", name, self.shape(sizes))
        self._sizes[result] = list(sizes)
        return result

    def know(self, name: str, sizes: Sequence[int | torch.SymInt]) -> None:
        """Remember the shape of a value that no node of the traced graph has."""
        self._sizes.setdefault(name, list(sizes))

    def _size(self, size: torch.SymInt | int, dtype: torch.dtype) -> str:
        expression = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        batch = self.graph("Shape", self._batch_input, start=0, end=1)
        batch = self.graph("Reshape", batch, self.graph.constant(np.zeros(0, np.int64)))
        name = self._evaluate(expression, batch)
        return name if dtype == torch.int64 else self.graph("Cast", name, to=onnx_type(dtype))

    def _evaluate(self, expression: Any, batch: str) -> str:
        if expression.is_Symbol:
            return batch
        if expression.is_Integer:
            return self.graph.constant(np.array(int(expression), np.int64))
        op = {"Mul": "Mul", "Add": "Add"}.get(type(expression).__name__)
        if op is None:
            raise ExportError("a size depends on the batch other than by sums and products")
        first, *others = [self._evaluate(part, batch) for part in expression.args]
        for other in others:
            first = self.graph(op, first, other)
        return first


class _Unknown:
    """Stands for what is known on the device alone."""


def dtype_of(value: Value) -> torch.dtype:
    """Dtype of a tensor of the traced graph or of a constant."""
    tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    return tensor.dtype if isinstance(tensor, Tensor) else torch.get_default_dtype()


def sizes_of(value: Value) -> list[int | torch.SymInt]:
    """Sizes of a tensor of the traced graph or of a constant, [] for a number."""
    tensor = value.meta["val"] if isinstance(value, fx.Node) else value
    return list(tensor.shape) if isinstance(tensor, Tensor) else []


def same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are the same, whatever the batch."""
    return [_key(size) for size in a] == [_key(size) for size in b]


def _key(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.SymInt):
        return not value.node.expr.is_Integer
    if isinstance(value, Tensor):
        return any(_is_symbolic(size) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return any(_is_symbolic(part) for part in value)
    return False
