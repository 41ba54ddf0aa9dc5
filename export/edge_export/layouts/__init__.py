"""Permutations that wait until somebody needs the numbers in another order: most of them cancel out.

A convolution wants its maps with the batch innermost, a linear layer the transpose of its weight, and
autograd turns back what either has turned; as kernels each of these would be a pass over the memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from edge_export.layouts.rules import RULES, pointwise
from edge_export.layouts.values import Rule, Turned, Value, all_settled, on_settled, settled, turned

__all__ = ["Rule", "Turned", "Value", "on_settled", "settled", "turned", "without_permutations"]


def without_permutations(
    graph: fx.GraphModule, inputs: Sequence[Tensor], rules: Mapping[OpOverload[..., Any], Rule]
) -> fx.GraphModule:
    """The same function with the permutations that are left, each where its result is used.

    Args:
        inputs: fake tensors, whose sizes may be symbolic.
        rules: a runtime's own, for operators that are none of PyTorch's or that it says otherwise.
    """
    interpreter = _Interpreter(graph, {**RULES, **rules})
    traced = make_fx(lambda *tensors: interpreter.run(*tensors), tracing_mode="symbolic")(*inputs)
    traced.graph.eliminate_dead_code()
    return traced


class _Interpreter(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, rules: Mapping[Any, Rule]) -> None:
        super().__init__(graph)
        self._rules = rules

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on tensors that may be turned."""
        if rule := self._rules.get(target):
            return rule(*args, **kwargs)
        if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
            return pointwise(target, args, kwargs)
        return on_settled(target)(*args, **kwargs)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results, turned as they are to be."""
        return super().output(target, all_settled(args), kwargs)
