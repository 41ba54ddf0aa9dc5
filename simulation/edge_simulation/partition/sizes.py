"""Labels alike on all devices: in equal shares, or in shares of skewed sizes."""

from __future__ import annotations

import numpy as np

from edge_sdk.tensors import Array
from edge_simulation.partition.draw import check_concentration, checked, deal
from edge_simulation.partition.per_class import split
from edge_simulation.partition.shares import Partition


def iid(labels: Array, *, devices: int, seed: int) -> Partition:
    """Shares drawn uniformly, that differ in size by one example at most and leave none over.

    Raises:
        DataError: labels, devices or seed outside their range.
    """
    labels = checked(labels, devices, seed)
    order = np.random.default_rng(seed).permutation(len(labels))
    return Partition("iid", [np.sort(part) for part in np.array_split(order, devices)], seed)


def quantity_skew(labels: Array, *, devices: int, beta: float, seed: int, least: int = 1) -> Partition:
    """Sizes ~ Dir(β, …, β), examples drawn uniformly: devices differ in how much they have, not in what.

    Takes the weighting by sample counts apart from label skew. Every example is on one device. A device
    with fewer than ``least`` is seen to as in :func:`dirichlet_per_class`.

    Args:
        labels: int ``[N]``, not negative.
        devices: count of devices.
        beta: concentration from 0 (all examples on one device, but for ``least``) to inf (equal sizes);
            1 spreads the sizes about as an exponential distribution.
        seed: not negative; the same seed gives the same partition.
        least: examples that every device has.

    Raises:
        DataError: labels, devices, beta or seed outside their range, or too few examples for ``least``.
    """
    labels = checked(labels, devices, seed, least)
    check_concentration("beta", beta)
    generator = np.random.default_rng(seed)
    counts, moved = split(np.array([len(labels)]), devices, beta, least, generator)
    dealt = deal(np.zeros(len(labels), np.int64), counts, generator)
    return Partition(f"quantity_skew(beta={beta:g})", dealt, seed, moved)
