"""Federated averaging (McMahan et al., arXiv 1602.05629), in terms of updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edge_sdk.manifest import Rule
from edge_sdk.tensors import Tensors
from edge_server.aggregation.mean import MeanUpdate
from edge_server.aggregation.strategy import State, Strategy, descend


def fedavg() -> Strategy:
    """w ← w − Δ, where Δ is the mean of received minus trained weights.

    Use it as the baseline, and where the devices' labels are nearly alike.
    """

    def init(weights: Tensors, _rules: Mapping[str, Rule]) -> State:
        return State(dict(weights), {})

    def apply(state: State, mean: MeanUpdate) -> State:
        return State(descend(state.weights, mean, mean.delta), {})

    return Strategy("fedavg", init, apply)


def fedprox() -> Strategy:
    """FedAvg under the name of FedProx (Li et al., arXiv 1812.06127), whose other half is on the devices.

    Use it with a proximal term in the devices' loss, where some of them train much longer than others.
    """
    return replace(fedavg(), name="fedprox")
