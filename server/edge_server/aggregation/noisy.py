"""The mean of clipped updates, with noise that hides each of them (McMahan et al., arXiv 1710.06963)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge_sdk.manifest import Rule
from edge_sdk.noise import deviation, gaussian
from edge_sdk.tensors import Array, Tensors, TensorSpec
from edge_server.aggregation.mean import MeanUpdate, Precision


@dataclass(frozen=True, slots=True)
class Noise:
    """What is added to a round's sum.

    Attributes:
        multiplier: z, the standard deviation as a multiple of ``largest``; above 0.
        largest: the L2 norm to which each update is clipped.
        seed: 32 bytes. Who has them can take the noise away again.
    """

    multiplier: float
    largest: float
    seed: bytes


class NoisySum:
    """Σ Δ_k plus Gaussian noise, over the number of updates that were wanted.

    Use it where the models are not to tell whether a device has put in its update or zero. Each update
    counts once, whatever its examples, and the divisor is fixed before the first one comes: both would
    tell of the devices otherwise. A model without parameters but trainable ones is needed, since nothing
    hides a running statistic.

    Args:
        specs: of the tensors.
        rules: ``mean`` for each of them.
        precision: of the sum; see :func:`plan_precision` with the noise.
        wanted: updates that the round waits for.
    """

    def __init__(
        self,
        specs: list[TensorSpec],
        rules: Mapping[str, Rule],
        precision: Precision,
        *,
        noise: Noise,
        wanted: int,
    ) -> None:
        if open_ones := sorted(name for name, rule in rules.items() if rule != "mean"):
            raise ValueError(f"nothing hides the {rules[open_ones[0]]} tensor {open_ones[0]!r}")
        self._rules, self._noise, self._wanted = rules, noise, wanted
        self._step = 2.0 ** precision.exponents["mean"]
        self._sums: Tensors = {spec.name: np.zeros(spec.shape, np.int64) for spec in specs}
        self._updates = 0
        self.examples = 0

    def add(self, update: Mapping[str, Array], examples: int) -> None:
        """Add Δ_k, clipped; ``examples`` = n_k is counted and has no weight."""
        if examples < 1:
            raise ValueError(f"an update of {examples} examples has no weight")
        if self._updates == self._wanted:
            raise ValueError(f"the round has the {self._wanted} updates that it wants")
        for name, total in self._sums.items():
            total += np.rint(update[name].astype(np.float64) * self._step).astype(np.int64)
        self._updates += 1
        self.examples += examples

    def mean(self) -> MeanUpdate:
        """Add the noise and divide once, in float64. ValueError if nothing was added."""
        if not self._updates:
            raise ValueError("the mean of no updates is not defined")
        values = sum(total.size for total in self._sums.values())
        spread = deviation(self._noise.multiplier, self._noise.largest * self._step, values)
        delta: Tensors = {}
        for name, total in self._sums.items():
            noise = np.rint(spread * gaussian(self._noise.seed, name, total.shape)).astype(np.int64)
            delta[name] = np.asarray((total + noise) / (self._step * self._wanted))
        return MeanUpdate(delta, self._rules)
