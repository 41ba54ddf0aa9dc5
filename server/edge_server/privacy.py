"""What the models of a run with noise tell of one device, as (ε, δ). The arithmetic is a library's."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from edge_sdk.errors import RunError
from edge_sdk.manifest import Manifest
from edge_server.rows import RunRow
from edge_server.store import Store


def check_noise(manifest: Manifest) -> None:
    """Check that a run with noise can be had of a bundle, here.

    Raises:
        RunError: the bundle has tensors that noise does not cover, or the accountant is not installed.
    """
    if open_ones := sorted(name for name, rule in manifest.rules.items() if rule != "mean"):
        raise RunError(
            f"noise does not cover {open_ones[0]!r}, which devices send as it is: export a model without "
            "running statistics (GroupNorm or LayerNorm in place of BatchNorm), or set noise_multiplier to 0"
        )
    if importlib.util.find_spec("dp_accounting") is None:
        raise RunError("noise needs dp-accounting: pip install 'edge-sdk-fl[privacy]'")


def epsilon(multiplier: float, rounds: int, *, delta: float) -> float:
    """ε of a device that was in ``rounds`` rounds.

    So many Gaussian mechanisms with multiplier z are one with z/√rounds (Dong et al., arXiv 1905.02383,
    section 3.2), whose ε is exact (Balle and Wang, arXiv 1805.06530, theorem 8). Nothing is taken off for
    the rounds in which the device was not chosen.

    Args:
        multiplier: z, above 0.
        delta: δ in (0, 1).
    """
    if not rounds:
        return 0.0
    accounting: Any = importlib.import_module("dp_accounting")
    return float(accounting.get_epsilon_gaussian(multiplier / math.sqrt(rounds), delta))


class Spent:
    """In how many of a run's models each device has had a part.

    Args:
        multiplier: z of every round.
        delta: δ for which ε is stated.
    """

    def __init__(self, multiplier: float, delta: float) -> None:
        self._multiplier, self._delta = multiplier, delta
        self._rounds = Counter[str]()

    @classmethod
    def restore(cls, store: Store, run: RunRow) -> Spent:
        """As the store has it."""
        spent = cls(run.config.noise_multiplier, run.config.delta)
        for row in store.rounds(run.id) if run.config.noise_multiplier else []:
            if row.status == "aggregated":
                spent.add(result.device for result in store.results(row))
        return spent

    def add(self, devices: Iterable[str]) -> None:
        """Note the devices of a round that has become a model, each once."""
        self._rounds.update(set(devices))

    @property
    def epsilon(self) -> float | None:
        """Of the device with the most rounds; None without noise."""
        if not self._multiplier:
            return None
        return epsilon(self._multiplier, max(self._rounds.values(), default=0), delta=self._delta)


def simulated_seed(seed: int, round_number: int) -> bytes:
    """The noise of a simulation's round, 32 bytes: the same for the same run, and no secret."""
    return hashlib.sha256(f"edge-sdk simulated noise {seed} {round_number}".encode()).digest()
