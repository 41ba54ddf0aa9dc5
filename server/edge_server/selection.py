"""Which devices take part in a round."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import numpy as np

from edge_server.cohort import Cohort


def select(
    present: Iterable[str],
    *,
    wanted: int,
    over_selection: float,
    groups: Mapping[str, int],
    seed: int,
    round_number: int,
    attempt: int,
) -> Cohort:
    """Draw a round's cohort: at random, or one random device of each group (FLDG, arXiv 2201.12515).

    Args:
        present: the devices to draw from.
        wanted: results that complete the round; with groups at most one a group.
        over_selection: how many more are asked than are wanted, 1.0 for none.
        groups: by device, its group; empty for random selection. A device without one is in a group with
            the others that have none.
        seed, round_number, attempt: the same three and the same devices give the same cohort.
    """
    order = random_order(present, seed=seed, round_number=round_number, attempt=attempt)
    mine = {device: groups.get(device, -1) for device in order} if groups else {}
    wanted = min(wanted, len(set(mine.values()))) if mine else wanted
    return Cohort(wanted=wanted, asked=math.ceil(wanted * over_selection), order=order, groups=mine)


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


def device_seed(seed: int, round_number: int, device: str, *, hop: int = 0) -> int:
    """The seed of one device's shuffles in one round, or turn of it: 53 bits, the same in every attempt."""
    turn = f"/{hop}" if hop else ""
    digest = hashlib.sha256(f"{seed}/{round_number}/{device}{turn}".encode()).digest()
    return int.from_bytes(digest[:7], "big") >> 3
