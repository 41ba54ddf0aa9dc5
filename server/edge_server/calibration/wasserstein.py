"""How far the classes' Gaussians lie apart: the paper's forecast of what calibration can reach."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from edge_server.calibration.pool import Pooled


def sliced_wasserstein(pooled: Pooled, *, projections: int = 100, seed: int = 0) -> float:
    """Mean over all pairs of classes of the sliced 2-Wasserstein distance of their Gaussians.

    The larger, the more a calibrated classifier can tell apart (arXiv 2106.05001, section 5). Our reading:
    a pair's distance is the root of the mean over directions of W₂²; on a direction both are normal, so that
    W₂² = (m₁ − m₂)² + (s₁ − s₂)² exactly. In the features' own unit: it compares models of one scale.

    Args:
        pooled: the Gaussians; classes without a sample are left out.
        projections: directions, uniform on the sphere.
        seed: of the directions; not negative.

    Returns:
        The distance, 0 if fewer than two classes have a sample.
    """
    directions = np.random.default_rng(seed).standard_normal((projections, pooled.mean.shape[1]))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    means, deviations = [], []
    for _, mean, covariance in pooled.gaussians():
        means.append(directions @ mean)
        spread = directions * covariance if covariance.ndim == 1 else directions @ covariance
        deviations.append(np.sqrt(np.maximum((spread * directions).sum(axis=1), 0.0)))
    distances = [
        np.sqrt(((means[i] - means[j]) ** 2 + (deviations[i] - deviations[j]) ** 2).mean())
        for i, j in combinations(range(len(means)), 2)
    ]
    return float(np.mean(distances)) if distances else 0.0
