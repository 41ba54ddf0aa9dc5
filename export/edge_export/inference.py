"""One ordinary ONNX file that predicts: what an app ships that never trains. Needs onnx, not PyTorch."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import numpy_helper

from edge_export.errors import ExportError
from edge_sdk.bundle import Bundle
from edge_sdk.manifest import Input

PREFIX = "weights/"
PREPARED, FEATURES = "/prepared", "/features"


def inference_onnx(bundle: Bundle) -> bytes:
    """The bundle's predict program with its weights and what is done to an image before it inside.

    A frozen backbone is part of that.

    Returns:
        An ONNX model with the input ``x``, float32 [batch, C, H, W] in [0, 1], **not** normalised, where H
        and W are those of the data set's images, before a crop; the output ``logits``, float32 [batch,
        classes]; and the weights as initialisers by their own names.

    Raises:
        ExportError: the bundle holds no predict program or backbone that onnx can read, or a weight is called
            as the input or the output is.
        BundleError: the bundle was not exported for ONNX.
    """
    model = _read(bundle.program("onnx", "predict"), f"the predict program of {bundle.manifest.name!r}")
    graph, weights = model.graph, bundle.weights
    if clash := {"x", "logits"} & weights.keys():
        raise ExportError(
            f"the weight {min(clash)!r} is called like an input or output: rename it in the model"
        )
    _rename(graph, "value", PREPARED if bundle.manifest.backbone is None else FEATURES)

    inputs = [value for value in graph.input if not value.name.startswith(PREFIX)]
    used = [value.name.removeprefix(PREFIX) for value in graph.input if value.name.startswith(PREFIX)]
    del graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.extend(numpy_helper.from_array(weights[name], name) for name in used)

    if bundle.manifest.backbone is not None:
        frozen = _read(bundle.backbone("onnx"), f"the backbone of {bundle.manifest.name!r}").graph
        _put_first(graph, frozen)
    _prepare(graph, bundle.manifest.input)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString(deterministic=True))


def _read(program: bytes, name: str) -> onnx.ModelProto:
    try:
        return onnx.load_model_from_string(program)
    except Exception as error:  # protobuf's error type is not the same in all its versions
        raise ExportError(f"{name} is not ONNX") from error


def _put_first(graph: onnx.GraphProto, frozen: onnx.GraphProto) -> None:
    """Let what enters ``graph`` be what ``frozen`` gives, and images enter that."""
    _rename(frozen, "backbone", PREPARED)
    nodes = [*frozen.node, *graph.node]
    nodes.insert(len(frozen.node), onnx.helper.make_node("Identity", [frozen.output[0].name], [FEATURES]))
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(frozen.initializer)
    del graph.input[:]
    graph.input.extend(frozen.input)


def _prepare(graph: onnx.GraphProto, input: Input) -> None:
    """Put first what :func:`edge_sdk.data.prepare` does to an image that is not trained on."""
    nodes: list[onnx.NodeProto] = []

    def constant(name: str, values: object, dtype: type) -> str:
        graph.initializer.append(numpy_helper.from_array(np.array(values, dtype), f"/{name}"))
        return f"/{name}"

    def apply(op: str, *inputs: str) -> str:
        nodes.append(onnx.helper.make_node(op, inputs, [f"/prepared/{len(nodes)}"]))
        return str(nodes[-1].output[0])

    x = "x"
    if input.image_shape != input.shape:
        spare = np.subtract(input.image_shape, input.shape)[1:]
        starts = constant("starts", spare // 2, np.int64)
        ends = constant("ends", spare // 2 + input.shape[1:], np.int64)
        x = apply("Slice", x, starts, ends, constant("axes", [2, 3], np.int64))
        for axis, size in zip(graph.input[0].type.tensor_type.shape.dim[1:], input.image_shape, strict=True):
            axis.dim_value = size
    x = apply("Sub", x, constant("mean", np.reshape(input.mean, (-1, 1, 1)), np.float32))
    x = apply("Div", x, constant("std", np.reshape(input.std, (-1, 1, 1)), np.float32))
    if input.pipeline is not None and input.pipeline.standardise:
        image = constant("image", [1, 2, 3], np.int64)
        least = constant("least", 1 / math.sqrt(math.prod(input.shape)), np.float32)
        x = apply("Sub", x, apply("ReduceMean", x, image))
        variance = apply("ReduceMean", apply("Mul", x, x), image)
        x = apply("Div", x, apply("Max", apply("Sqrt", variance), least))
    nodes[-1].output[0] = PREPARED
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)


def _rename(graph: onnx.GraphProto, group: str, entering: str) -> None:
    """Weights get their own names; all else inside, names with a slash, which no weight's name holds.

    Args:
        group: first part of those.
        entering: the name of what enters in the place of ``x``.
    """
    kept = {output.name for output in graph.output}

    def renamed(name: str) -> str:
        if not name or name in kept:
            return name
        if name == "x":
            return entering
        return name.removeprefix(PREFIX) if name.startswith(PREFIX) else f"/{group}/{name}"

    for node in graph.node:
        if any(attribute.HasField("g") for attribute in node.attribute):
            raise ExportError(
                f"{node.op_type} holds a graph of its own, which the inference export does not cover"
            )
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
    for initialiser in graph.initializer:
        initialiser.name = renamed(initialiser.name)
