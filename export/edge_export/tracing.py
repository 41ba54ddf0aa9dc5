"""From a program to a graph of plain operators, gradients included.

``torch.export`` refuses a function that differentiates, and exporting a joint graph with PyTorch's exporters
drops the gradients without a word; so ``make_fx`` traces the whole function to aten operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from edge_export.errors import ExportError
from edge_export.layouts import Rule, without_permutations
from edge_export.plain_functions import PlainFunctions
from edge_export.programs import Program

OTHER_BATCHES = (2, 4, 7, 64, 1000)
"""Sizes at which what the tracer assumed of the batch must hold too."""

_BATCH_BRANCH = "the forward pass branches on the size of the batch, or fixes it: the programs take any size"


def trace(
    program: Program,
    table: Mapping[OpOverload[..., Any], Callable[..., Any]],
    rules: Mapping[OpOverload[..., Any], Rule],
    *,
    any_batch: bool,
) -> tuple[fx.GraphModule, list[str]]:
    """The program as a graph of aten operators, and the names of its results.

    Args:
        table: an operator that is in it is said in those that its function calls.
        rules: those of the runtime by which permutations move past an operator.
        any_batch: for batches of any size, rather than for the one of the examples.

    Raises:
        ExportError: with ``any_batch``, the program holds for some sizes only. And what the tracer raises.
    """
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
        if any_batch and name in program.batched:
            sizes[0] = DimDynamic.DUCK  # one symbol for all: they are one batch
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    tensors = [fake(name, tensor) for name, tensor in program.arguments.items()]
    traced = make_fx(flat, decomposition_table=dict(table), tracing_mode="symbolic")(*tensors)
    traced.graph.eliminate_dead_code()
    # Only now, because functionalize knows no autograd.Function.
    traced = make_fx(functionalize(traced, remove="mutations"), tracing_mode="symbolic")(*tensors)
    traced.graph.eliminate_dead_code()
    traced = without_permutations(traced, tensors, rules)
    if any_batch:
        _check_any_batch(tensors[names.index("x")].shape[0], shapes)
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
