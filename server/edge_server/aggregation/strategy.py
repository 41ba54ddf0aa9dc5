"""What a strategy is: two pure functions over one immutable state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edge_sdk.errors import TensorError
from edge_sdk.manifest import Rule
from edge_sdk.tensors import Tensors, TensorSpec, decode, encode
from edge_server.aggregation.mean import MeanUpdate


@dataclass(frozen=True, slots=True)
class State:
    """A strategy's state between two rounds.

    Attributes:
        weights: what the devices get next.
        slots: what the strategy remembers, by a name of its own: float64, one tensor for each trainable
            one; none for running statistics and counters.
    """

    weights: Tensors
    slots: Mapping[str, Tensors]

    def to_bytes(self) -> bytes:
        """The state as safetensors, for :meth:`Strategy.restore`."""
        return encode(_flat(self))


@dataclass(frozen=True, slots=True)
class Strategy:
    """How the server makes the next model of a mean update.

    Attributes:
        name: for logs and reports.
        init: from the first weights and the rules of aggregation to a state.
        apply: from a state and a round's mean update to the next state.
        gain: what one mean update moves the model by in the long run, as a multiple of itself; None
            where that is no fixed number.
    """

    name: str
    init: Callable[[Tensors, Mapping[str, Rule]], State]
    apply: Callable[[State, MeanUpdate], State]
    gain: float | None = 1.0

    def effective_learning_rate(self, local: float) -> float | None:
        """``local`` times the gain: η/(1 − β) of Hsu et al. (arXiv 1909.06335).

        Strategies with the same one move alike over many rounds, so tune and compare by it. None for
        FedAdam, whose step has its own length whatever the devices' rate.
        """
        return None if self.gain is None else self.gain * local

    def restore(self, data: bytes, specs: list[TensorSpec], rules: Mapping[str, Rule]) -> State:
        """Read what :meth:`State.to_bytes` wrote.

        Raises:
            TensorError: it is not a state of this strategy and this model.
        """
        blank = self.init({spec.name: np.zeros(spec.shape, spec.dtype) for spec in specs}, rules)
        expected = [TensorSpec(key, array.shape, array.dtype.name) for key, array in _flat(blank).items()]
        try:
            tensors = decode(data, expected)
        except TensorError as error:
            raise TensorError(f"not a state of {self.name} for this model: {error}") from None
        parts: dict[str, Tensors] = {"weights": {}, **{slot: {} for slot in blank.slots}}
        for key, tensor in tensors.items():
            part, name = key.split("/", 1)
            parts[part][name] = tensor
        return State(parts.pop("weights"), parts)


def filled(weights: Tensors, rules: Mapping[str, Rule], value: float = 0.0) -> Tensors:
    """A slot in which every trainable tensor has ``value`` everywhere."""
    return {name: np.full(w.shape, value) for name, w in weights.items() if rules[name] == "mean"}


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


def _flat(state: State) -> Tensors:
    parts = {"weights": state.weights, **state.slots}
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
