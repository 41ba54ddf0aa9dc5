"""One ordinary ONNX file that predicts: what an app ships that never trains. Needs onnx, not PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from edge_export.errors import ExportError
from edge_sdk.bundle import Bundle

PREFIX = "weights/"


def inference_onnx(bundle: Bundle) -> bytes:
    """The bundle's predict program with its weights and its normalisation inside.

    Returns:
        An ONNX model with the input ``x``, float32 [batch, C, H, W] in [0, 1], **not** normalised; the
        output ``logits``, float32 [batch, classes]; and the weights as initialisers by their own names.

    Raises:
        ExportError: the bundle holds no predict program that onnx can read, or a weight is called as the
            input or the output is.
        BundleError: the bundle was not exported for ONNX.
    """
    try:
        model = onnx.load_model_from_string(bundle.program("onnx", "predict"))
    except Exception as error:  # protobuf's error type is not the same in all its versions
        raise ExportError(f"the predict program of {bundle.manifest.name!r} is not ONNX") from error
    graph, weights = model.graph, bundle.weights
    if clash := {"x", "logits"} & weights.keys():
        raise ExportError(
            f"the weight {min(clash)!r} is called like an input or output: rename it in the model"
        )
    _rename(graph)

    inputs = [value for value in graph.input if not value.name.startswith(PREFIX)]
    used = [value.name.removeprefix(PREFIX) for value in graph.input if value.name.startswith(PREFIX)]
    del graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.extend(numpy_helper.from_array(weights[name], name) for name in used)

    shape = (len(bundle.manifest.input.mean), 1, 1)
    for name, values in (("/mean", bundle.manifest.input.mean), ("/std", bundle.manifest.input.std)):
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.float32).reshape(shape), name))
    nodes = [
        onnx.helper.make_node("Sub", ["x", "/mean"], ["/centred"]),
        onnx.helper.make_node("Div", ["/centred", "/std"], ["/normalised"]),
        *graph.node,
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def _rename(graph: onnx.GraphProto) -> None:
    """Weights get their own names; all else inside, names with a slash, which no weight's name holds."""
    kept = {output.name for output in graph.output}

    def renamed(name: str) -> str:
        if not name or name in kept:
            return name
        if name == "x":
            return "/normalised"
        return name.removeprefix(PREFIX) if name.startswith(PREFIX) else f"/value/{name}"

    for node in graph.node:
        if any(attribute.HasField("g") for attribute in node.attribute):
            raise ExportError(
                f"{node.op_type} holds a graph of its own, which the inference export does not cover"
            )
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
    for initialiser in graph.initializer:
        initialiser.name = renamed(initialiser.name)
