"""Server momentum for non-identical clients (Hsu et al., arXiv 1909.06335, section 4.2)."""

from __future__ import annotations

from collections.abc import Mapping

from edge_sdk.manifest import Rule
from edge_sdk.tensors import Tensors
from edge_server.aggregation.mean import MeanUpdate
from edge_server.aggregation.strategy import State, Strategy, descend, filled


def fedavgm(*, momentum: float, learning_rate: float = 1.0, nesterov: bool = True) -> Strategy:
    """FedAvg with momentum on the server: v ← βv + Δ, then w ← w − η(βv + Δ) with the new v.

    Use it when few devices take part and their labels are skewed: it averages over rounds what one
    round's devices cannot show. With strong momentum take a small local learning rate; the effective
    one is multiplied by η/(1 − β).

    Args:
        momentum: β in [0, 1). At 0 this is FedAvg, to the bit.
        learning_rate: η of the server, 1.0 in the paper.
        nesterov: as in the paper; otherwise the step is ηv, the classical momentum.

    Raises:
        ValueError: β or η outside its range.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum {momentum} is not in [0, 1)")
    if not 0 < learning_rate <= 100:
        raise ValueError(f"server learning rate {learning_rate} is not in (0, 100]")

    def init(weights: Tensors, rules: Mapping[str, Rule]) -> State:
        return State(dict(weights), {"velocity": filled(weights, rules)})

    def apply(state: State, mean: MeanUpdate) -> State:
        velocity = {name: momentum * v + mean.delta[name] for name, v in state.slots["velocity"].items()}
        ahead = {n: momentum * v + mean.delta[n] for n, v in velocity.items()} if nesterov else velocity
        step = {name: learning_rate * direction for name, direction in ahead.items()}
        return State(descend(state.weights, mean, step), {"velocity": velocity})

    return Strategy("fedavgm", init, apply, gain=learning_rate / (1 - momentum))
