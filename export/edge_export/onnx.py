"""Lowering: a program traced with its backward pass, and written as standard ONNX operators.

``torch.export`` refuses a function that differentiates, and exporting a joint graph to ONNX with PyTorch's
exporter drops the gradients without a word; so ``make_fx`` traces the whole function to aten operations,
and that graph, which holds no differentiation any more, is translated operator by operator.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from edge_export.decompositions import FORWARD, TRAIN
from edge_export.errors import ExportError
from edge_export.onnx_operators import TRANSLATIONS
from edge_export.plain_functions import PlainFunctions
from edge_export.programs import Program
from edge_export.translator import OperatorError, Translator

OTHER_BATCHES = (2, 4, 7, 64, 1000)
"""Sizes at which what the tracer assumed of the batch must hold too."""

_BATCH_BRANCH = "the forward pass branches on the size of the batch, or fixes it: the programs take any size"


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
        traced, results = _trace(program)
        return _translate(traced, program, results)


def _trace(program: Program) -> tuple[fx.GraphModule, list[str]]:
    names = list(program.arguments)
    results: list[str] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        # Attention by products of matrices, not by a kernel of PyTorch's own.
        with PlainFunctions(), sdpa_kernel(SDPBackend.MATH):
            outputs = program.run(dict(zip(names, tensors, strict=True)))
        results[:] = outputs
        return tuple(outputs.values())

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)

    def fake(name: str, tensor: Tensor) -> Tensor:
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if name in program.batched:
            sizes[0] = DimDynamic.DUCK  # one symbol for all: they are one batch
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    tensors = [fake(name, tensor) for name, tensor in program.arguments.items()]
    table = TRAIN if program.trains else FORWARD
    traced = make_fx(flat, decomposition_table=table, tracing_mode="symbolic")(*tensors)
    traced.graph.eliminate_dead_code()
    # Only now, because functionalize knows no autograd.Function.
    traced = make_fx(functionalize(traced, remove="mutations"), tracing_mode="symbolic")(*tensors)
    _check_any_batch(tensors[names.index("x")].shape[0], shapes)
    traced.graph.eliminate_dead_code()
    return traced, results


def _check_any_batch(batch: int | torch.SymInt, shapes: ShapeEnv) -> None:
    """Refuse what the tracer could follow for its own batch only."""
    if not isinstance(batch, torch.SymInt):
        raise ExportError(_BATCH_BRANCH)
    expression = shapes.replace(batch.node.expr)
    if expression.is_Integer:
        raise ExportError(_BATCH_BRANCH)
    for guard in shapes.guards:
        # PyTorch's own code asks too, to choose among kernels that give the same.
        where = getattr(guard.sloc.framework_loc, "filename", "")
        if where.startswith(str(Path(torch.__file__).parent)):
            continue
        if any(guard.expr.subs(expression, size) is sympy.false for size in OTHER_BATCHES):
            raise ExportError(_BATCH_BRANCH)


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


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # the tracer raises what it likes, over many lines
        chain = _chain(error)
        text = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
        if re.search(r"data.?dependent|_local_scalar_dense|\.item\(\)|bool\(\)", text, re.IGNORECASE):
            raise ExportError(
                "the forward pass branches on the values of a tensor, which a fixed program cannot: "
                "use torch.where or a mask"
            ) from error
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the tracer's notes."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.fx")]
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
