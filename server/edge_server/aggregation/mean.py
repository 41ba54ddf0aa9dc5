"""The weighted mean of updates in fixed point: the same bits whatever the order of arrival.

Integer addition is associative, so retries and races cannot change a model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edge_sdk.errors import RunError
from edge_sdk.manifest import Rule
from edge_sdk.noise import FINENESS
from edge_sdk.tensors import Array, Tensors, TensorSpec

HEADROOM = 62
"""bound · 2^exponent · Σ counts stays below 2^62, so that an int64 sum can never wrap."""
MIN_EXPONENT = 16
MAX_EXPONENT = 62
"""The largest that a task may announce."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How updates are rounded: by rule of aggregation, two base-2 logarithms.

    Attributes:
        bounds: of the largest magnitude that an update may hold.
        exponents: of the number of steps per unit; the rounding error is half a step.
    """

    bounds: Mapping[str, int]
    exponents: Mapping[str, int]


def plan_precision(bounds: Mapping[str, int], *, largest_total: int, noise: float = 0.0) -> Precision:
    """Choose the finest exponents that cannot overflow.

    Args:
        bounds: by rule, base-2 logarithm of the largest magnitude.
        largest_total: the largest Σ n_k that a round may have.
        noise: standard deviation of what is added to the sum of trainable tensors, 0 for nothing.

    Raises:
        RunError: a bound, or the noise, leaves fewer than 16 fractional bits.

    >>> plan_precision({"mean": 6}, largest_total=10 << 17).exponents["mean"]
    34
    """
    exponents = {}
    for rule, bound in bounds.items():
        if rule == "counter":
            continue
        exponent = HEADROOM - 1 - bound - math.ceil(math.log2(largest_total))
        if exponent < MIN_EXPONENT:
            raise RunError(
                f"a bound of 2^{bound} for {rule} tensors over {largest_total} examples leaves {exponent} "
                f"fractional bits, fewer than {MIN_EXPONENT}: lower the bound or max_examples"
            )
        exponents[rule] = min(exponent, MAX_EXPONENT)
    if noise:
        exponent = FINENESS - math.ceil(math.log2(noise))
        if exponent < MIN_EXPONENT:
            raise RunError(
                f"noise of deviation {noise:g} leaves {exponent} fractional bits, fewer than "
                f"{MIN_EXPONENT}: lower noise_multiplier or max_norm"
            )
        exponents["mean"] = min(exponents["mean"], exponent)
    return Precision(dict(bounds), exponents)


@dataclass(frozen=True, slots=True)
class MeanUpdate:
    """What a round's updates come to.

    Attributes:
        delta: by name, Σ n_k Δ_k / Σ n_k in float64; for counters the largest advance, int64 and
            negative as Δ is.
        rules: rule of aggregation by name.
    """

    delta: Tensors
    rules: Mapping[str, Rule]


class WeightedSum:
    """A running Σ n_k Δ_k. Feed it updates that :func:`edge_sdk.update.check_update` has passed.

    Args:
        unit: what one example weighs in full; an update may count for a whole-numbered part of it.
    """

    def __init__(
        self, specs: list[TensorSpec], rules: Mapping[str, Rule], precision: Precision, *, unit: int = 1
    ) -> None:
        self._rules = rules
        self._unit = unit
        self._precision = precision
        self._sums: Tensors = {spec.name: np.zeros(spec.shape, np.int64) for spec in specs}
        self.examples = 0

    def add(self, update: Mapping[str, Array], examples: int, *, share: int | None = None) -> None:
        """Add Δ_k with weight ``examples`` = n_k, which is at least 1.

        Args:
            share: of ``unit``, by which Δ_k is made smaller; all of it by default.
        """
        weight = examples * (self._unit if share is None else share)
        if examples < 1 or weight < 1:
            raise ValueError(f"an update of {examples} examples has no weight")
        for name, rule in self._rules.items():
            if rule == "counter":
                np.minimum(self._sums[name], update[name], out=self._sums[name])
            else:
                step = 2.0 ** self._precision.exponents[rule]
                self._sums[name] += np.rint(update[name].astype(np.float64) * step).astype(np.int64) * weight
        self.examples += examples

    def mean(self) -> MeanUpdate:
        """Divide once, in float64. ValueError if nothing was added."""
        if self.examples == 0:
            raise ValueError("the mean of no updates is not defined")
        delta = {
            name: self._sums[name].copy()
            if rule == "counter"
            else self._sums[name] / (2.0 ** self._precision.exponents[rule] * self._unit * self.examples)
            for name, rule in self._rules.items()
        }
        return MeanUpdate(delta, self._rules)
