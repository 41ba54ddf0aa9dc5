"""What a strategy is: two pure functions over one immutable state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edge_sdk.manifest import Rule
from edge_sdk.tensors import Tensors, TensorSpec, decode, encode
from edge_server.aggregation.mean import MeanUpdate


@dataclass(frozen=True, slots=True)
class State:
    """A strategy's state between two rounds.

    Attributes:
        weights: what the devices get next.
        velocity: float64, one for each trainable tensor; none for running statistics and counters.
    """

    weights: Tensors
    velocity: Tensors

    def to_bytes(self) -> bytes:
        """The state as safetensors."""
        return encode(
            {f"weights/{name}": tensor for name, tensor in self.weights.items()}
            | {f"velocity/{name}": tensor for name, tensor in self.velocity.items()}
        )

    @classmethod
    def from_bytes(cls, data: bytes, specs: list[TensorSpec], rules: Mapping[str, Rule]) -> State:
        """Read what :meth:`to_bytes` wrote; TensorError if it is not a state of this model."""
        expected = [TensorSpec(f"weights/{spec.name}", spec.shape, spec.dtype) for spec in specs]
        expected += [
            TensorSpec(f"velocity/{spec.name}", spec.shape, "float64")
            for spec in specs
            if rules[spec.name] == "mean"
        ]
        tensors = decode(data, expected)
        parts: dict[str, Tensors] = {"weights": {}, "velocity": {}}
        for key, tensor in tensors.items():
            part, name = key.split("/", 1)
            parts[part][name] = tensor
        return cls(parts["weights"], parts["velocity"])


@dataclass(frozen=True, slots=True)
class Strategy:
    """How the server makes the next model of a mean update.

    Attributes:
        name: for logs and reports.
        init: from the first weights and the rules of aggregation to a state.
        apply: from a state and a round's mean update to the next state.
    """

    name: str
    init: Callable[[Tensors, Mapping[str, Rule]], State]
    apply: Callable[[State, MeanUpdate], State]


def zero_velocity(weights: Tensors, rules: Mapping[str, Rule]) -> State:
    """The first state: the given weights, at rest."""
    velocity = {n: np.zeros(w.shape, np.float64) for n, w in weights.items() if rules[n] == "mean"}
    return State(dict(weights), velocity)


def descend(weights: Tensors, mean: MeanUpdate, step: Tensors) -> Tensors:
    """w ← w − step for trainable tensors, w ← w − Δ for running statistics and counters.

    The difference is taken in float64 and rounded once to the weights' own dtype.
    """
    new: Tensors = {}
    for name, weight in weights.items():
        if mean.rules[name] == "counter":
            moved_to = weight - mean.delta[name]
        else:
            delta = step[name] if mean.rules[name] == "mean" else mean.delta[name]
            moved_to = (weight.astype(np.float64) - delta).astype(weight.dtype)
        # NumPy makes a scalar of an array without dimensions, which no runtime takes.
        new[name] = np.asarray(moved_to)
    return new
