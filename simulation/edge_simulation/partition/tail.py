"""A training set in which some classes are rare, for a test set that stays balanced."""

from __future__ import annotations

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array
from edge_simulation.partition.draw import checked


def long_tail(labels: Array, *, ratio: float, seed: int) -> Array:
    """A part of the set whose classes shrink exponentially, class 0 the largest.

    Class k of C keeps n·ratio^(-k/(C-1)) examples, as in the long-tailed CIFAR of Cui et al. (arXiv
    1901.05555). It stands in for the letter frequencies that Astraea samples EMNIST by (arXiv 1907.01132,
    section II-B): global imbalance, which its augmentation is for. Leave the test set as it is.

    Divide ``labels[indices]`` by any partition and map it back by :meth:`Partition.within`.

    Args:
        labels: of the training set, int ``[N]``, not negative. n is as large as they allow.
        ratio: the largest class over the smallest, 1 or more.
        seed: not negative; draws which examples of a class are kept.

    Returns:
        Indices of the kept examples, int64, ascending.

    Raises:
        DataError: labels, ratio or seed outside their range, or a class of which none would be kept.
    """
    labels = checked(labels, 1, seed)
    if not 1 <= ratio < np.inf:
        raise DataError(f"ratio {ratio}: give the largest class over the smallest, 1 or more")
    present, sizes = np.unique(labels, return_counts=True)
    profile = float(ratio) ** -np.linspace(0, 1, len(sizes))
    # The product is a whole number wherever a class sets the scale; floating point may fall short of it.
    keep = np.floor(profile * (sizes / profile).min() + 1e-9).astype(np.int64)
    if keep.min() == 0:
        raise DataError(
            f"ratio {ratio:g} leaves class {present[keep.argmin()]} no example; give a smaller one"
        )
    generator = np.random.default_rng(seed)
    chosen = [
        generator.permutation(np.flatnonzero(labels == label))[:count]
        for label, count in zip(present, keep, strict=True)
    ]
    kept: Array = np.sort(np.concatenate(chosen))
    return kept
