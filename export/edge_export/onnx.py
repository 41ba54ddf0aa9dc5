"""Lowering: a program traced with its backward pass, and written as standard ONNX operators.

The traced graph holds no differentiation any more, and is translated operator by operator.
"""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
from torch import fx

from edge_export.decompositions import FORWARD, RULES, TRAIN, TRAIN_RULES
from edge_export.onnx_operators import TRANSLATIONS
from edge_export.programs import Program
from edge_export.tracer_errors import one_line_errors, quiet
from edge_export.tracing import trace
from edge_export.training_step import Tensors
from edge_export.translator import Translator
from edge_export.verify import Step
from edge_sdk.tensors import Array


def lower(program: Program) -> bytes:
    """Write ``program`` as an ONNX model; the same program gives the same bytes.

    Inputs and outputs bear the program's names; an input that nothing reads is left out. Operators are
    of the standard domain at opset 18, the batch is dynamic, and nothing is kept of where the model's
    source lies.

    Raises:
        ExportError: the program depends on values or on the batch size in its flow of control, or uses
            an operator that ONNX or the table of decompositions does not have.
    """
    with quiet(), one_line_errors():
        table, rules = (TRAIN, TRAIN_RULES) if program.trains else (FORWARD, RULES)
        traced, results = trace(program, table, rules, any_batch=True)
        return _translate(traced, program, results)


def onnx_step(program: bytes) -> Step:
    """A train program in ONNX Runtime, on one thread."""
    one_thread = ort.SessionOptions()
    one_thread.intra_op_num_threads = 1
    session = ort.InferenceSession(program, one_thread, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def step(arguments: Tensors) -> dict[str, Array]:
        fed = {node.name: arguments[node.name].numpy() for node in session.get_inputs()}
        return dict(zip(names, session.run(names, fed), strict=True))

    return step


def _translate(traced: fx.GraphModule, program: Program, results: list[str]) -> bytes:
    translator = Translator("x", TRANSLATIONS)
    placeholders = iter(program.arguments)
    outputs: list[Any] = []
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            translator.bind(node, next(placeholders))
        elif node.op == "output":
            outputs = list(node.args[0])
        else:
            translator.translate(node, traced)
    model = translator.graph.finish(
        [(name, tensor, name in program.batched) for name, tensor in program.arguments.items()],
        [
            (name, translator.name(node), node.meta["val"], name in program.batched_results)
            for name, node in zip(results, outputs, strict=True)
        ],
    )
    return bytes(model.SerializeToString(deterministic=True))
