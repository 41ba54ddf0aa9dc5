"""Aggregation that a few lying devices cannot pull far (Yin et al., arXiv 1803.01498)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from edge_sdk.manifest import Rule
from edge_sdk.tensors import Array
from edge_server.aggregation.mean import MeanUpdate

RobustRule: TypeAlias = Literal["median", "trimmed_mean"]


class RobustMean:
    """The middle of the updates, coordinate by coordinate, in place of their mean.

    Use it where some devices may lie: less than half of them (median), or a share ``trim`` (trimmed mean),
    move no coordinate beyond the honest ones. It costs accuracy where honest devices differ, since rare
    labels look like lies; it holds all updates of a round in memory; and it does not weigh by examples, of
    which a liar could claim many.

    Args:
        rules: rule of aggregation by name. Counters get the lower median of the advances.
        rule: ``median``, or ``trimmed_mean``.
        trim: β in [0, 0.5): the share left out at either end of each coordinate, rounded down.
    """

    def __init__(self, rules: Mapping[str, Rule], rule: RobustRule, *, trim: float = 0.1) -> None:
        if not 0 <= trim < 0.5:
            raise ValueError(f"trim {trim} is not in [0, 0.5)")
        self._rules, self._rule, self._trim = rules, rule, trim
        self._updates: list[Mapping[str, Array]] = []
        self.examples = 0

    def add(self, update: Mapping[str, Array], examples: int) -> None:
        """Take Δ_k in; ``examples`` = n_k is counted and has no weight."""
        if examples < 1:
            raise ValueError(f"an update of {examples} examples has no weight")
        self._updates.append(update)
        self.examples += examples

    def mean(self) -> MeanUpdate:
        """The middle, in float64: the same bits whatever the order. ValueError if nothing was added."""
        if not self._updates:
            raise ValueError("the mean of no updates is not defined")
        delta = {}
        for name, rule in self._rules.items():
            ordered = np.sort(np.stack([update[name] for update in self._updates]), axis=0)
            count = len(ordered)
            if rule == "counter":
                delta[name] = np.asarray(ordered[count // 2])
                continue
            cut = (count - 1) // 2 if self._rule == "median" else math.floor(self._trim * count)
            delta[name] = np.asarray(ordered[cut : count - cut].astype(np.float64).mean(axis=0))
        return MeanUpdate(delta, self._rules)
