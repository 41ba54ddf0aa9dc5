"""The fleets of Astraea (Duan et al., arXiv 1907.01132, sections II-B and IV) but the long-tailed ones."""

from __future__ import annotations

import math

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array
from edge_simulation.partition.draw import checked, deal, even
from edge_simulation.partition.per_class import split
from edge_simulation.partition.shares import Partition


def balanced(labels: Array, *, devices: int, seed: int) -> Partition:
    """Every device has as much of every class, to within one example, and as much in all.

    Unlike :func:`iid` there is no chance in the counts. Every example is on one device.

    Args:
        labels: int ``[N]``, not negative. Devices are balanced where these are, else they mirror them.
        devices: count of devices.
        seed: not negative; draws which examples of a class go where.

    Raises:
        DataError: labels, devices or seed outside their range.
    """
    labels = checked(labels, devices, seed)
    _, of_class, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    # Each class's remainder starts where the last one's ended, or the first devices would get them all.
    starts = (sizes.cumsum() - sizes) % devices
    counts = [np.roll(even(int(size), devices), start) for size, start in zip(sizes, starts, strict=True)]
    dealt = deal(of_class, np.stack(counts, axis=1), np.random.default_rng(seed))
    return Partition("balanced", dealt, seed)


def client_imbalanced(
    labels: Array, *, devices: int, seed: int, divergence: float = 0.55, least: int = 1
) -> Partition:
    """Devices of random sizes and labels that together are as balanced as the set.

    The paper says of its fleets how far they are from uniform, a mean KL divergence of .550 before and
    .125 behind mediators, and not what they were drawn from. Our reading: each class is split over the
    devices by Dir(α, …, α) as in :func:`dirichlet_per_class`, with the α at which KL(Dir(α, …, α) ‖
    uniform) is ``divergence`` in expectation: .61 for ten classes and .550. Over 100 devices of 500 or
    600 examples that gave .544, with a deviation of .022 over ten seeds. A long tail adds to it: on
    ``long_tail(ratio=5)``, where augmentation has something to do, .47 gives .55, and on
    ``long_tail(ratio=10)`` .37.

    Args:
        labels: int ``[N]``, not negative.
        devices: count of devices.
        seed: not negative; the same seed gives the same partition.
        divergence: mean KL divergence of the devices to uniform over the classes present, in nats,
            between 0 and the logarithm of their count. It holds where the labels are balanced and a device
            has some hundreds of examples.
        least: examples that every device has, as in :func:`dirichlet_per_class`.

    Raises:
        DataError: labels, devices, seed or divergence outside their range, or too few examples for
            ``least``.
    """
    labels = checked(labels, devices, seed, least)
    _, of_class, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    alpha = _concentration(divergence, len(sizes))
    generator = np.random.default_rng(seed)
    counts, moved = split(sizes, devices, alpha, least, generator)
    dealt = deal(of_class, counts, generator)
    return Partition(f"client_imbalanced(divergence={divergence:g})", dealt, seed, moved)


def _concentration(divergence: float, classes: int) -> float:
    """α with E KL(Dir(α, …, α) ‖ uniform) = ln C - ψ(Cα + 1) + ψ(α + 1) = ``divergence``, by bisection."""
    try:
        from scipy.special import digamma  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise DataError("client_imbalanced needs SciPy: pip install 'edge-sdk-fl[simulation]'") from None
    if not 0 < divergence < math.log(classes):
        raise DataError(
            f"divergence {divergence}: {classes} classes allow one between 0 and {math.log(classes):.3g}"
        )
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        alpha = math.exp(middle)
        if math.log(classes) - digamma(classes * alpha + 1) + digamma(alpha + 1) > divergence:
            low = middle
        else:
            high = middle
    return math.exp(low)
