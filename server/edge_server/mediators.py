"""Chains of devices whose labels together come near uniform (Astraea, Duan et al., arXiv 1907.01132)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge_sdk.errors import RunError
from edge_sdk.tensors import Array

LARGEST_ALPHA = 10.0
LARGEST_MULTIPLE = 100.0
"""More copies of one example teach nothing, and one device's lies must not drown the others in copies."""
DECIMALS = 3
"""Of a multiple: the same short number wherever it is read, and many fit into a message."""
# Candidates that differ by rounding alone are equal, whatever order a machine sums in.
_TIE = 1e-12


def multiples(histogram: Array, alpha: float) -> dict[int, float]:
    """How many times its examples each rare class should have: (mean / C_y)^α (section III-C).

    Our reading: the mean is over all classes, and the figure is the target multiple, so that α = 1 brings
    a class up to the mean and α = 0 adds nothing. The paper's best α are 0.67 and 1.

    Args:
        histogram: examples of each class over all devices, int64 ``[classes]``.
        alpha: from 0 to 10.

    Returns:
        Of each class below the mean that has examples: its multiple, above 1, at most 100, to three decimals.

    Raises:
        RunError: α outside its range, or counts that are no counts.

    >>> multiples(np.array([6, 2, 1, 3]), alpha=1.0)
    {1: 1.5, 2: 3.0}
    """
    if not 0 <= alpha <= LARGEST_ALPHA:
        raise RunError(f"augmentation alpha {alpha} is not in [0, {LARGEST_ALPHA:g}]")
    counts = _counts(histogram, "the global histogram")
    if alpha == 0:
        return {}
    mean = counts.mean()
    rare = np.flatnonzero((counts > 0) & (counts < mean))
    wanted = np.minimum((mean / counts[rare]) ** alpha, LARGEST_MULTIPLE)
    found = {
        int(label): round(float(multiple), DECIMALS) for label, multiple in zip(rare, wanted, strict=True)
    }
    return {label: multiple for label, multiple in found.items() if multiple > 1}


def divergence(counts: Array) -> float:
    """KL(counts / Σ counts ‖ uniform), natural logarithm: 0 is balanced, log(classes) one class alone.

    No counts at all give log(classes) too, the largest value, so that a mean over devices stays finite.

    Args:
        counts: examples of each class, ``[classes]``.

    Raises:
        RunError: counts that are no counts.

    >>> round(divergence(np.array([5, 5, 0, 0])), 4)  # log 2
    0.6931
    """
    return float(_divergences(_counts(counts, "the histogram")[None])[0])


def chains(histograms: Mapping[str, Array], *, longest: int) -> list[list[str]]:
    """Place every device behind a mediator (the paper's rescheduling, section III-C).

    One mediator after the other is filled: each step takes, of the devices that are left, the one with
    which the mediator's summed counts diverge least from uniform. Ties go to the smaller id. A device that
    shares no counts says nothing about the balance: such devices fill the places left at the end.

    Args:
        histograms: of the round's devices by id, each int64 ``[classes]``, after augmentation.
        longest: γ, the most devices in a chain.

    Returns:
        ⌈devices / γ⌉ chains of ids, in the order in which they were taken; all but the last hold γ.

    Raises:
        RunError: γ below 1, counts that are no counts, or histograms of different lengths.

    >>> chains({"a": np.array([4, 0]), "b": np.array([3, 0]), "c": np.array([0, 4])}, longest=2)
    [['a', 'c'], ['b']]
    """
    if longest < 1:
        raise RunError(f"a chain of at most {longest} devices is none: use at least 1")
    devices = sorted(histograms)
    if not devices:
        return []
    rows = [_counts(histograms[device], f"the histogram of device {device}") for device in devices]
    if len({len(row) for row in rows}) > 1:
        raise RunError("the devices' histograms have different lengths: all must count the model's classes")
    counts = np.stack(rows)
    left = np.flatnonzero(counts.any(axis=1))
    silent = np.flatnonzero(~counts.any(axis=1))
    order: list[int] = []
    while len(left):
        if len(order) % longest == 0:
            mediator = np.zeros(counts.shape[1])
        distances = _divergences(mediator + counts[left])
        best = int(np.argmax(distances <= distances.min() + _TIE))
        mediator = mediator + counts[left[best]]
        order.append(int(left[best]))
        left = np.delete(left, best)
    ids = [devices[row] for row in [*order, *silent.tolist()]]
    return [ids[start : start + longest] for start in range(0, len(ids), longest)]


def _divergences(counts: Array) -> Array:
    """KL to uniform of each row of float64 ``[n, classes]``."""
    totals = counts.sum(axis=1)
    totals[totals == 0] = 1
    # Σ p log p = Σ n log n / N - log N, where 0 log 0 = 0; an empty row comes out as log(classes).
    terms = counts * np.log(np.where(counts > 0, counts, 1))
    found: Array = terms.sum(axis=1) / totals - np.log(totals) + np.log(counts.shape[1])
    return np.maximum(found, 0)


def _counts(histogram: Array, name: str) -> Array:
    counts = np.asarray(histogram)
    shaped = counts.ndim == 1 and len(counts) > 0 and counts.dtype.kind in "uif"
    if not shaped or not np.isfinite(counts).all() or counts.min() < 0:
        raise RunError(f"{name} is {counts.tolist()!r:.80}, expected counts of at least 0, [classes]")
    return counts.astype(np.float64)
