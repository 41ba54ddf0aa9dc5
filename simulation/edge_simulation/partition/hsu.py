"""Each device's distribution over classes is drawn (Hsu et al., arXiv 1909.06335)."""

from __future__ import annotations

import math

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array
from edge_simulation.partition.draw import check_concentration, checked, deal, dirichlet, even
from edge_simulation.partition.shares import Partition


def dirichlet_hsu(
    labels: Array, *, devices: int, alpha: float, seed: int, share: int | None = None
) -> Partition:
    """Non-identical label distributions of one size (Hsu et al., arXiv 1909.06335, section 3).

    Each device draws its class distribution q ~ Dir(α·p), p being that of the whole set, then its examples
    one after another without replacement; a class that runs out is renormalised away. Small α is the
    usual benchmark of label skew: 0.1 leaves a device two or three of ten classes. Over C even classes
    Dir(α·p) is the symmetric Dirichlet of α/C.

    Where all classes of a device's q have run out (q is zero in float64 elsewhere, which a tiny α
    brings), the rest is drawn from what the other devices leave over; ``reassigned`` counts it.

    Args:
        labels: int ``[N]``, not negative.
        devices: count of devices.
        alpha: concentration from 0 to inf. inf is IID: examples drawn whatever their class. At 0 each
            device has one class, each class as many devices as its prior asks for.
        seed: not negative; the same seed gives the same partition.
        share: examples a device; what is left over is on no device. By default every example is on one,
            and the shares differ by one example at most.

    Raises:
        DataError: labels, devices, alpha, seed or share outside their range.
    """
    labels = checked(labels, devices, seed)
    check_concentration("alpha", alpha)
    if share is not None and not 1 <= share <= len(labels) // devices:
        raise DataError(f"a share of {share} for each of {devices} devices: there are {len(labels)} examples")
    shares = even(len(labels), devices) if share is None else np.full(devices, share)
    generator = np.random.default_rng(seed)
    _, of_class, left = np.unique(labels, return_inverse=True, return_counts=True)

    counts = np.zeros((devices, len(left)), np.int64)
    if not math.isinf(alpha):
        prior = left / len(labels)
        if alpha == 0:
            distributions = _one_class_each(prior, devices, generator)
        else:
            distributions = dirichlet(prior, alpha, devices, generator)
        for device in range(devices):
            counts[device] = _draw(distributions[device], left, int(shares[device]), generator)
            left = left - counts[device]
    # Only after every device has had its own: who ran short must not take what others still need.
    short = shares - counts.sum(axis=1)
    for device in np.flatnonzero(short).tolist():
        more = generator.multivariate_hypergeometric(left, short[device], method="marginals")
        counts[device] += more
        left = left - more
    reassigned = 0 if math.isinf(alpha) else int(short.sum())
    return Partition(f"dirichlet_hsu(alpha={alpha:g})", deal(of_class, counts, generator), seed, reassigned)


def _one_class_each(prior: Array, devices: int, generator: np.random.Generator) -> Array:
    """One-hot distributions, float64 ``[devices, classes]``: a permutation gives each class its devices."""
    quotas = prior * devices
    takes = np.floor(quotas).astype(np.int64)
    # Largest remainders; ties broken at random, or the first classes would always have more devices.
    order = generator.permutation(len(prior))
    takes[order[np.argsort((takes - quotas)[order], kind="stable")][: devices - takes.sum()]] += 1
    owners = generator.permutation(np.repeat(np.arange(len(prior)), takes))
    distributions: Array = np.eye(len(prior))[owners]
    return distributions


def _draw(distribution: Array, left: Array, share: int, generator: np.random.Generator) -> Array:
    """Up to ``share`` examples by class, int64 ``[classes]``.

    Drawing a batch, keeping what there is and drawing the rest anew has the law of drawing one by one:
    renormalising is rejection. Every turn but the last exhausts a class, so it ends.
    """
    counts = np.zeros_like(left)
    while (need := share - int(counts.sum())) > 0:
        open_classes = np.flatnonzero((distribution > 0) & (counts < left))
        if len(open_classes) == 0:
            break
        q = distribution[open_classes]
        # Divided by the largest first: a sum of subnormals would not normalise.
        q = q / q.max()
        drawn = generator.multinomial(need, q / q.sum())
        counts[open_classes] = np.minimum(counts[open_classes] + drawn, left[open_classes])
    return counts
