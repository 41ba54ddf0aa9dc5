"""Adam on the server (Reddi et al., arXiv 2003.00295, algorithm 2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge_sdk.manifest import Rule
from edge_sdk.tensors import Tensors
from edge_server.aggregation.mean import MeanUpdate
from edge_server.aggregation.strategy import State, Strategy, descend, filled


def fedadam(*, learning_rate: float, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Strategy:
    """m ← β₁m + (1 − β₁)Δ, v ← β₂v + (1 − β₂)Δ², then w ← w − ηm/(√v + τ) with the new m and v.

    Use it where gradients are sparse or differ much in scale from tensor to tensor, as with embeddings.
    Every weight moves by about η a round, whatever the devices' rate: 1.0, which FedAvgM takes, is far
    too large; start at 0.01.

    As in the paper there is no bias correction: v starts at τ², the least it allows, so the first steps
    are neither blown up nor undefined. Δ is weighted by examples, as with the other strategies here; the
    paper's is a plain mean.

    Args:
        learning_rate: η of the server.
        beta1: of the mean update's average, in [0, 1).
        beta2: of its square's average, in [0, 1).
        tau: how large an update must be to be normalised, the degree of adaptivity, in (0, 1]. The
            defaults of the three are the paper's.

    Raises:
        ValueError: an argument outside its range.
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} {beta} is not in [0, 1)")
    if not 0 < learning_rate <= 100:
        raise ValueError(f"server learning rate {learning_rate} is not in (0, 100]")
    if not 0 < tau <= 1:
        raise ValueError(f"tau {tau} is not in (0, 1]")

    def init(weights: Tensors, rules: Mapping[str, Rule]) -> State:
        slots = {"moment": filled(weights, rules), "second_moment": filled(weights, rules, tau * tau)}
        return State(dict(weights), slots)

    def apply(state: State, mean: MeanUpdate) -> State:
        moment = {
            name: beta1 * m + (1 - beta1) * mean.delta[name] for name, m in state.slots["moment"].items()
        }
        second = {
            name: beta2 * v + (1 - beta2) * (mean.delta[name] * mean.delta[name])
            for name, v in state.slots["second_moment"].items()
        }
        step = {name: learning_rate * m / (np.sqrt(second[name]) + tau) for name, m in moment.items()}
        return State(descend(state.weights, mean, step), {"moment": moment, "second_moment": second})

    return Strategy("fedadam", init, apply, gain=None)
