"""What the partitions share: checks, Dirichlet distributions, and counts dealt out as examples."""

from __future__ import annotations

import math

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array


def checked(labels: Array, devices: int, seed: int, least: int = 1) -> Array:
    """The labels as an array, int ``[N]``.

    Raises:
        DataError: labels that are no integers from 0, a device short of ``least``, a negative seed.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise DataError(f"labels are {labels.dtype} {list(labels.shape)}, expected integers from 0, [N]")
    if devices < 1 or least < 0 or len(labels) < max(1, devices * least):
        needs = "one" if least == 1 else f"{least}"
        raise DataError(f"cannot divide {len(labels)} examples among {devices} devices: each needs {needs}")
    if seed < 0:
        raise DataError(f"seed {seed}: give an integer from 0")
    return labels


def check_concentration(name: str, value: float) -> None:
    """DataError unless ``value`` is from 0 to inf."""
    if math.isnan(value) or value < 0:
        raise DataError(f"{name} {value}: give a concentration from 0 (most skewed) to inf (even)")


def dirichlet(mean: Array, alpha: float, count: int, generator: np.random.Generator) -> Array:
    """Draws of Dir(α·mean), float64 ``[count, len(mean)]``, and of its limits at α = 0 and inf.

    At 0 a draw is one-hot, at inf it is the mean; ``mean`` is above 0 everywhere.
    """
    if math.isinf(alpha):
        return np.tile(mean, (count, 1))
    if alpha == 0:
        hot: Array = np.eye(len(mean))[generator.choice(len(mean), count, p=mean)]
        return hot
    # Far beyond both limits' reach, and within it the sampler neither underflows nor overflows.
    return generator.dirichlet(min(max(alpha, 1e-290), 1e290) * mean, count)


def deal(of_class: Array, counts: Array, generator: np.random.Generator) -> list[Array]:
    """Turn counts int ``[devices, classes]`` into ascending examples, drawn at random within each class."""
    decks = [generator.permutation(np.flatnonzero(of_class == label)) for label in range(counts.shape[1])]
    ends = counts.cumsum(axis=0)
    return [
        np.sort(
            np.concatenate(
                [deck[end - count : end] for deck, end, count in zip(decks, ends[d], counts[d], strict=True)]
            )
        )
        for d in range(len(counts))
    ]


def even(count: int, parts: int) -> Array:
    """``count`` in ``parts`` that differ by one at most, the larger first, int64 ``[parts]``."""
    return count // parts + (np.arange(parts) < count % parts)
