"""Statistics of a class with Gaussian noise on what one example adds to them.

An example adds 1 to its class's count, x to the sum of features and x xᵀ to the sum of products. With x
clipped to a norm R, these are sums of sensitivity 1, R and R², and noise of √3 · z times each hides the
example as one Gaussian mechanism with multiplier z does (in the manner of Dwork et al., "Analyze Gauss",
STOC 2014). What is made of the noisy sums tells no more than they do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edge_sdk.noise import noised
from edge_sdk.tensors import Array


@dataclass(frozen=True, slots=True)
class FeatureNoise:
    """How a device hides its examples.

    Attributes:
        multiplier: z, above 0.
        norm: R, to which each feature is clipped; above 0.
        seed: 32 bytes from the operating system, new for each answer.
    """

    multiplier: float
    norm: float
    seed: bytes

    def hide(self, values: Array, sensitivity: float, name: str) -> Array:
        """One of the three sums with its noise; ``name`` tells it from the others."""
        return noised(values, sensitivity, math.sqrt(3) * self.multiplier, seed=self.seed, name=name)


def hidden_counts(counts: Array, noise: FeatureNoise, *, withhold_below: int) -> Array:
    """Counts int64 ``[classes]`` with noise, and no more in all than there are.

    The exact number of all examples is told in any case, and a server refuses more.
    """
    most = int(counts.sum())
    noisy = np.maximum(np.rint(noise.hide(counts.astype(np.float64), 1.0, "count")), 0.0)
    if noisy.sum() > most:
        noisy = np.floor(noisy * (most / noisy.sum()))
    return np.where(noisy < withhold_below, 0, noisy).astype(np.int64)


def hidden_moments(
    batches: Iterable[Array], count: int, noise: FeatureNoise, *, name: str, feature_size: int, diagonal: bool
) -> tuple[Array, Array]:
    """Mean ``[d]`` and scatter ``[d, d]``, or its diagonal, of features float32 ``[n, d]`` a batch.

    Args:
        count: the noisy one, at least 1.
        name: of the class.
    """
    total = np.zeros(feature_size)
    products = np.zeros(feature_size if diagonal else (feature_size, feature_size))
    for batch in batches:
        features = batch.astype(np.float64)
        norms = np.linalg.norm(features, axis=1, keepdims=True)
        features *= np.minimum(1.0, noise.norm / np.maximum(norms, np.finfo(np.float64).tiny))
        total += features.sum(axis=0)
        products += (features**2).sum(axis=0) if diagonal else features.T @ features
    mean = noise.hide(total, noise.norm, f"{name}/mean") / count
    mean *= min(1.0, noise.norm / max(float(np.linalg.norm(mean)), np.finfo(np.float64).tiny))
    if count < 2:
        return mean, np.zeros_like(products)
    if diagonal:
        noisy = noise.hide(products, noise.norm**2, f"{name}/scatter")
        return mean, np.maximum(noisy - count * mean**2, 0.0)
    return mean, _nearest(_hidden_matrix(products, noise, name) - count * np.outer(mean, mean))


def _hidden_matrix(products: Array, noise: FeatureNoise, name: str) -> Array:
    """Symmetric noise: a pair of equal entries counts twice in the norm, so each gets half the variance."""
    rows, columns = np.triu_indices(len(products))
    weight = np.where(rows == columns, 1.0, math.sqrt(2))
    triangle = noise.hide(products[rows, columns] * weight, noise.norm**2, f"{name}/scatter") / weight
    noisy = np.zeros_like(products)
    noisy[rows, columns] = noisy[columns, rows] = triangle
    return noisy


def _nearest(matrix: Array) -> Array:
    """The positive semi-definite matrix that is nearest to a symmetric one (Higham 1988)."""
    values, vectors = np.linalg.eigh(matrix)
    near = (vectors * np.maximum(values, 0.0)) @ vectors.T
    symmetric: Array = (near + near.T) / 2
    return symmetric
