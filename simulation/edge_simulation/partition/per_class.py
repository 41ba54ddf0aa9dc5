"""Each class's distribution over devices is drawn, as in the experiments of CCVR (arXiv 2106.05001)."""

from __future__ import annotations

import numpy as np

from edge_sdk.tensors import Array
from edge_simulation.partition.draw import check_concentration, checked, deal, dirichlet
from edge_simulation.partition.shares import Partition

REDRAWS = 100
"""Draws that are thrown away for leaving a device short, before the best one is repaired."""


def dirichlet_per_class(labels: Array, *, devices: int, alpha: float, seed: int, least: int = 1) -> Partition:
    """Devices of unequal sizes and labels (Luo et al., arXiv 2106.05001, appendix E.1: 10 devices).

    For each class p ~ Dir(α, …, α) over the devices, and the class's examples are split in those
    proportions, rounded. Every example is on one device. With many devices a device's labels are about
    Dir(α, …, α) over the classes too, so α here skews as α·classes does in :func:`dirichlet_hsu`.

    A draw that leaves a device with fewer than ``least`` examples is thrown away, up to 100 times; then
    the draw that lacks the fewest is repaired: who is short gets examples at random of whoever has most,
    and ``reassigned`` counts them. The published code of the field asks for 10 examples and redraws for
    ever. It also gives no more to a device that has its even share, which is not done here: our reading.

    Args:
        labels: int ``[N]``, not negative.
        devices: count of devices.
        alpha: concentration from 0 to inf: .05 to .5 in the paper. At 0 each class is on one device; inf
            splits each class evenly.
        seed: not negative; the same seed gives the same partition.
        least: examples that every device has.

    Raises:
        DataError: labels, devices, alpha or seed outside their range, or too few examples for ``least``.
    """
    labels = checked(labels, devices, seed, least)
    check_concentration("alpha", alpha)
    generator = np.random.default_rng(seed)
    _, of_class, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    counts, moved = split(sizes, devices, alpha, least, generator)
    return Partition(f"dirichlet_per_class(alpha={alpha:g})", deal(of_class, counts, generator), seed, moved)


def split(
    sizes: Array, devices: int, alpha: float, least: int, generator: np.random.Generator
) -> tuple[Array, int]:
    """Each class's ``sizes`` split by Dir(α, …, α): int64 ``[devices, classes]``, and how many were moved."""

    def drawn() -> Array:
        shares = dirichlet(np.full(devices, 1 / devices), float(alpha) * devices, len(sizes), generator)
        # Rounding the borders and not the shares keeps each class's sum.
        borders = np.rint(shares.cumsum(axis=1)[:, :-1] * sizes[:, None]).astype(np.int64)
        counts: Array = np.diff(borders, axis=1, prepend=0, append=sizes[:, None]).T
        return counts

    def lacking(counts: Array) -> int:
        return int(np.maximum(least - counts.sum(axis=1), 0).sum())

    best = drawn()
    for _ in range(REDRAWS):
        if lacking(best) == 0:
            break
        best = min(best, drawn(), key=lacking)
    moved = lacking(best)
    _top_up(best, least, generator)
    return best, moved


def _top_up(counts: Array, least: int, generator: np.random.Generator) -> None:
    """Move examples, in place, until every device has ``least``: there must be enough for all.

    Every turn ends a device's want or a donor's surplus, so it ends.
    """
    totals = counts.sum(axis=1)
    for device in np.flatnonzero(totals < least).tolist():
        while totals[device] < least:
            donor = int(totals.argmax())
            given = min(least - totals[device], totals[donor] - least)
            moved = generator.multivariate_hypergeometric(counts[donor], given, method="marginals")
            counts[donor] -= moved
            counts[device] += moved
            totals[donor] -= given
            totals[device] += given
