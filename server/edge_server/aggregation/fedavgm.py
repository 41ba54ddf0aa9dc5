"""Server momentum for non-identical clients (Hsu et al., arXiv 1909.06335, section 4.2)."""

from __future__ import annotations

from edge_server.aggregation.mean import MeanUpdate
from edge_server.aggregation.strategy import State, Strategy, descend, zero_velocity


def fedavgm(*, momentum: float, learning_rate: float = 1.0) -> Strategy:
    """FedAvg with Nesterov momentum on the server: v ← βv + Δ, w ← w − η(βv + Δ) with the new v.

    Use it when few devices take part and their labels are skewed: it averages over rounds what one
    round's devices cannot show. With strong momentum take a small local learning rate; the effective
    one is multiplied by 1/(1 − β).

    Args:
        momentum: β in [0, 1). At 0 this is FedAvg, to the bit.
        learning_rate: η of the server, 1.0 in the paper.

    Raises:
        ValueError: β or η outside its range.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum {momentum} is not in [0, 1)")
    if not 0 < learning_rate <= 100:
        raise ValueError(f"server learning rate {learning_rate} is not in (0, 100]")

    def apply(state: State, mean: MeanUpdate) -> State:
        velocity = {name: momentum * v + mean.delta[name] for name, v in state.velocity.items()}
        step = {name: learning_rate * (momentum * v + mean.delta[name]) for name, v in velocity.items()}
        return State(descend(state.weights, mean, step), velocity)

    return Strategy("fedavgm", zero_velocity, apply)
