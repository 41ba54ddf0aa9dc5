"""Virtual features: draws from each class's Gaussian."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from edge_sdk.tensors import Array
from edge_server.calibration.pool import Pooled

Balance: TypeAlias = Literal["equal", "frequency"]


def virtual_features(
    pooled: Pooled, *, per_class: int, balance: Balance, seed: int, shrinkage: float = 0.0
) -> tuple[Array, Array]:
    """Draw features of every class that has a sample (arXiv 2106.05001, section 4).

    They are not clipped at 0, though real ones that come out of a ReLU are (our reading). A covariance may
    be singular: in its null space all draws are the mean.

    Args:
        pooled: the Gaussians.
        per_class: M_c, or its mean over the classes.
        balance: ``equal``: M_c of each class; ``frequency``: in proportion to the pooled counts, never 0.
        seed: not negative. Each class has its own stream.
        shrinkage: of the covariances; see :meth:`Pooled.gaussians`.

    Returns:
        Features float64 ``[N, d]`` and labels int64 ``[N]``, by class.
    """
    present = np.flatnonzero(pooled.count)
    sizes = np.full(len(present), per_class)
    if balance == "frequency":
        shares = pooled.count[present] / pooled.count.sum()
        sizes = np.maximum(np.rint(shares * sizes.sum()), np.minimum(sizes, 1)).astype(np.int64)
    drawn = []
    for size, gaussian in zip(sizes.tolist(), pooled.gaussians(shrinkage=shrinkage), strict=True):
        label, mean, covariance = gaussian
        white = np.random.default_rng([seed, label]).standard_normal((size, len(mean)))
        drawn.append(mean + _correlated(white, covariance))
    return np.concatenate(drawn), np.repeat(present, sizes)


def _correlated(white: Array, covariance: Array) -> Array:
    """Give standard normal rows a covariance by its symmetric root.

    The root is unique where eigenvectors are not: another machine's features differ by rounding alone.
    """
    if covariance.ndim == 1:
        return white * np.sqrt(covariance)
    values, vectors = np.linalg.eigh(covariance)
    coloured: Array = white @ (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return coloured
