"""An ONNX graph under construction: each operation once, each constant once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from edge_export.schedule import by_depth

OPSET = 18
IR_VERSION = 10
"""The newest that ONNX Runtime 1.20 reads."""

_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.bool: onnx.TensorProto.BOOL,
}


def onnx_type(dtype: torch.dtype) -> int:
    """The ONNX number of ``dtype``; KeyError for one that no program uses."""
    return int(_TYPES[dtype])


class OnnxGraph:
    """Nodes and constants so far; values go by their names.

    The same operation on the same inputs gives the value that is there already, which makes explicit
    code that is written once for each use (masks, transposes, one-hot matrices) free of repetition.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._initialisers: list[onnx.TensorProto] = []
        self._seen: dict[object, list[str]] = {}
        self._producers: dict[str, onnx.NodeProto] = {}

    def __call__(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The one output of the ONNX operator ``op`` on ``inputs``, "" for an input left out."""
        return self.emit(op, inputs, 1, **attributes)[0]

    def emit(self, op: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:
        """The outputs of ``op``; see ``__call__``."""
        key = (op, tuple(inputs), outputs, repr(sorted(attributes.items())))
        if key not in self._seen:
            names = [f"v{len(self._producers) + i}" for i in range(outputs)]
            node = helper.make_node(op, list(inputs), names, **attributes)
            self.nodes.append(node)
            self._producers |= dict.fromkeys(names, node)
            self._seen[key] = names
        return self._seen[key]

    def constant(self, value: Tensor | np.ndarray[Any, Any]) -> str:
        """Name of an initialiser that holds ``value``."""
        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        array = np.array(array, order="C")  # ascontiguousarray would give a scalar an axis
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = self._constants[key] = f"c{len(self._constants)}"
            self._initialisers.append(numpy_helper.from_array(array, name))
        return self._constants[key]

    def integers(self, *values: int) -> str:
        """Name of an int64 vector, as the shape and axes inputs of ONNX operators want them."""
        return self.constant(np.array(values, np.int64))

    def producer(self, name: str) -> onnx.NodeProto | None:
        """The node that computes ``name``; None for an input or a constant."""
        return self._producers.get(name)

    def finish(
        self, inputs: Sequence[tuple[str, Tensor, bool]], outputs: Sequence[tuple[str, str, Tensor, bool]]
    ) -> onnx.ModelProto:
        """The model, without nodes, inputs and constants that no output needs.

        Args:
            inputs: name, example, and whether its first axis is the batch.
            outputs: name, the value that it is, example, and whether its first axis is the batch.
        """
        nodes = list(self.nodes)
        renamed: dict[str, str] = {}
        for name, value, _, _ in outputs:
            if value in self._producers and value not in renamed:
                renamed[value] = name
            else:  # an input, a constant or a value that is an output already
                nodes.append(helper.make_node("Identity", [value], [name]))
        for node in nodes:
            node.input[:] = [renamed.get(name, name) for name in node.input]
            node.output[:] = [renamed.get(name, name) for name in node.output]
        nodes, needed = _live(nodes, {name for name, *_ in outputs})
        graph = helper.make_graph(
            by_depth(nodes),
            "program",
            [_declaration(name, example, batched) for name, example, batched in inputs if name in needed],
            [_declaration(name, example, batched) for name, _, example, batched in outputs],
            [constant for constant in self._initialisers if constant.name in needed],
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="edge-sdk",
        )


def _live(nodes: list[onnx.NodeProto], needed: set[str]) -> tuple[list[onnx.NodeProto], set[str]]:
    kept = []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= set(node.input)
            kept.append(node)
    return kept[::-1], needed


def _declaration(name: str, example: Tensor, batched: bool) -> onnx.ValueInfoProto:
    shape: list[int | str] = [int(size) for size in example.shape] if not batched else ["batch"]
    if batched:
        shape += [int(size) for size in example.shape[1:]]
    return helper.make_tensor_value_info(name, onnx_type(example.dtype), shape)
