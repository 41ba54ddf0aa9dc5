"""Federated averaging (McMahan et al., arXiv 1602.05629), in terms of updates."""

from __future__ import annotations

from edge_server.aggregation.mean import MeanUpdate
from edge_server.aggregation.strategy import State, Strategy, descend, zero_velocity


def fedavg() -> Strategy:
    """w ← w − Δ, where Δ is the mean of received minus trained weights.

    Use it as the baseline, and where the devices' labels are nearly alike.
    """

    def apply(state: State, mean: MeanUpdate) -> State:
        return State(descend(state.weights, mean, mean.delta), state.velocity)

    return Strategy("fedavg", zero_velocity, apply)
