"""The devices behind one mediator: weights pass from one to the next (Astraea, arXiv 1907.01132, III-C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_sdk.tensors import Array, Tensors
from edge_sdk.update import difference


class Chain:
    """One chain in one round. Every device has its turn once in each pass.

    Args:
        devices: in the order of their turns, at least one.
        weights: what the first device gets.
        passes: E_m, how often the chain is gone through.
    """

    def __init__(self, devices: Sequence[str], weights: Tensors, *, passes: int = 1) -> None:
        self.devices = tuple(devices)
        self.hop = 0
        self.weights = weights
        self._start = weights
        self._passes = passes
        self._counts: dict[str, int] = {}

    @property
    def device(self) -> str | None:
        """Whose turn it is; None at the chain's end."""
        over = self.hop >= len(self.devices) * self._passes
        return None if over else self.devices[self.hop % len(self.devices)]

    @property
    def examples(self) -> int:
        """n_m: the sample counts of the devices with an accepted hop, each once."""
        return sum(self._counts.values())

    @property
    def delivered(self) -> list[str]:
        """The devices with an accepted hop."""
        return list(self._counts)

    def forward(self, update: Mapping[str, Array], examples: int) -> None:
        """The device has trained: w ← w − Δ, and the next has its turn."""
        assert self.device is not None
        self.credit(self.device, examples)
        self.weights = self.after(update)
        self.hop += 1

    def credit(self, device: str, examples: int) -> None:
        """A hop of the device counts, with its examples once."""
        self._counts.setdefault(device, examples)

    def skip(self) -> None:
        """The device has failed: the next one gets the last good weights."""
        self.hop += 1

    def after(self, update: Mapping[str, Array]) -> Tensors:
        """The weights that ``update`` would lead to."""
        return {name: np.asarray(weight - update[name]) for name, weight in self.weights.items()}

    def update(self, weights: Mapping[str, Array] | None = None) -> Tensors:
        """The mediator's Δ: what the first device got minus the present (or the given) weights."""
        return difference(self._start, self.weights if weights is None else weights)
