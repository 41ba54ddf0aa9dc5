"""Which operators a phone has: those of the stock Android library, and what XNNPACK computes."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from edge_export.translator import OperatorError


@cache
def android_kernels() -> frozenset[str]:
    """Names of all kernels, ``aten::add.out`` and the like."""
    text = resources.files("edge_export.executorch").joinpath("android_kernels.txt").read_text("utf-8")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def check_kernels(program: Any) -> None:
    """Raise OperatorError for the first operator of a lowered ``program`` that phones do not have."""
    for name in operators(program):
        if name not in android_kernels():
            operator = name.replace("::", ".").rsplit(".", 1)[0]
            raise OperatorError(operator, "ExecuTorch's library for phones")


def operators(program: Any) -> list[str]:
    """Names of the operators left to kernels, sorted; ``program`` is ExecuTorch's own description of it."""
    return sorted({_name(operator) for plan in program.execution_plan for operator in plan.operators})


def _name(operator: Any) -> str:
    return f"{operator.name}.{operator.overload}" if operator.overload else str(operator.name)
