"""Lowering: a program traced with its backward pass, and written as standard ONNX operators.

``torch.export`` refuses a function that differentiates, and exporting a joint graph straight to ONNX
drops the gradients without a word; so ``make_fx`` first traces the whole function to aten operations,
and that graph, which holds no differentiation any more, is exported.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator

import onnx
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from edge_export.decompositions import TABLE
from edge_export.errors import ExportError
from edge_export.onnx_operators import TRANSLATIONS
from edge_export.programs import Program

OPSET = 18
IR_VERSION = 10
"""The newest that ONNX Runtime 1.20 reads."""

MAX_BATCH = 1 << 16


RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}
)

_BATCH_BRANCH = "the forward pass branches on the size of the batch, or fixes it: the programs take any size"


class OperatorError(ExportError):
    """An operator has no ONNX translation, or no backward pass in the table of decompositions."""

    def __init__(self, operator: str) -> None:
        super().__init__(f"{operator} is not covered by the ONNX export: use another layer in its place")
        self.operator = operator


def lower(program: Program) -> bytes:
    """Write ``program`` as an ONNX model; the same program gives the same bytes.

    Inputs and outputs bear the program's names; an input that nothing reads is left out. Operators are
    of the standard domain at opset 18, the batch is dynamic, and nothing is kept of where the model's
    source lies.

    Raises:
        ExportError: the program depends on values or on the batch size in its flow of control, or uses
            an operator that ONNX or the table of decompositions does not have.
    """
    with _quiet(), _one_line_errors():
        graph, results = _trace(program)
        exported = _export(graph, program)
        proto = _to_onnx(exported, list(program.arguments), results)
    return bytes(_clean(proto).SerializeToString(deterministic=True))


def _trace(program: Program) -> tuple[fx.GraphModule, list[str]]:
    names = list(program.arguments)
    results: list[str] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = program.run(dict(zip(names, tensors, strict=True)))
        results[:] = outputs
        return tuple(outputs.values())

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(name: str, tensor: Tensor) -> Tensor:
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if name in program.batched:
            sizes[0] = DimDynamic.DUCK  # one symbol for all: they are one batch
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    tensors = [fake(name, tensor) for name, tensor in program.arguments.items()]
    graph = make_fx(flat, decomposition_table=TABLE, tracing_mode="symbolic")(*tensors)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph, results


def _export(graph: fx.GraphModule, program: Program) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    shapes = tuple({0: batch} if name in program.batched else None for name in program.arguments)
    # The graph takes *args, whose shapes are given as one tuple.
    return torch.export.export(graph, tuple(program.arguments.values()), dynamic_shapes=shapes)


def _to_onnx(
    exported: torch.export.ExportedProgram, inputs: list[str], outputs: list[str]
) -> onnx.ModelProto:
    program = torch.onnx.export(
        exported,
        args=(),
        dynamo=True,
        custom_translation_table=TRANSLATIONS,
        opset_version=OPSET,
        input_names=inputs,
        output_names=outputs,
        optimize=True,
        verbose=False,
        report=False,
    )
    assert program is not None
    return program.model_proto


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # the tracer and the exporter raise what they like, over many lines
        chain = _chain(error)
        text = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
        if re.search(r"data.?dependent|_local_scalar_dense|\.item\(\)|bool\(\)", text, re.IGNORECASE):
            raise ExportError(
                "the forward pass branches on the values of a tensor, which a fixed program cannot: "
                "use torch.where or a mask"
            ) from error
        if "ConstraintViolation" in text or "Constraints violated" in text:
            raise ExportError(_BATCH_BRANCH) from error
        if match := re.search(r"(?:aten|prims|torchvision)[.:]+\w+", _innermost_first(chain)):
            raise OperatorError(match[0].replace("::", ".")) from error
        raise ExportError(f"the model cannot be traced ({(text.strip().splitlines())[0][:200]})") from error


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _innermost_first(chain: list[BaseException]) -> str:
    return "\n".join(str(link) for link in reversed(chain))


def _clean(model: onnx.ModelProto) -> onnx.ModelProto:
    """Strip what no device needs: it is 60 to 90 % of the file, and holds paths of source files."""
    graph = model.graph
    read = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    used = [value for value in graph.input if value.name in read]
    del graph.input[:]
    graph.input.extend(used)
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    for value in (*graph.input, *graph.output):
        for extent in value.type.tensor_type.shape.dim:
            if extent.dim_param:  # a symbol of the tracer's, s40 say
                extent.dim_param = "batch"
    for domain in [opset for opset in model.opset_import if opset.domain]:
        model.opset_import.remove(domain)
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version, graph.name = "edge-sdk", "", "program"
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in graph.node if node.domain})
    if foreign or model.functions:
        raise OperatorError((foreign or ["a function"])[0])
    if random := sorted({node.op_type for node in graph.node} & RANDOM_OPERATORS):
        raise ExportError(
            f"the model draws random numbers ({random[0]}), which would be the same in every session: "
            "use nn.Dropout, whose noise is an input"
        )
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes on its own deprecations and on packages that are not needed."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "torch.fx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
