"""Which devices take part in a round."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np


def random_order(devices: Iterable[str], *, seed: int, round_number: int, attempt: int) -> list[str]:
    """The devices in a random order: the first ones are asked, the next ones replace those that fail.

    The order depends on the set of ids and the numbers given, not on the order of ``devices``.

    >>> random_order("ab", seed=1, round_number=1, attempt=0) == random_order("ba", seed=1, round_number=1,
    ... attempt=0)
    True
    """
    ordered = sorted(devices)
    rng = np.random.default_rng([seed, round_number, attempt])
    return [ordered[i] for i in rng.permutation(len(ordered))]


def device_seed(seed: int, round_number: int, device: str) -> int:
    """The seed of one device's shuffles in one round: 53 bits, the same in every attempt."""
    digest = hashlib.sha256(f"{seed}/{round_number}/{device}".encode()).digest()
    return int.from_bytes(digest[:7], "big") >> 3
