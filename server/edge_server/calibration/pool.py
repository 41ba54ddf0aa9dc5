"""The mean and the covariance of all devices' features, from each device's statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from edge_sdk.errors import RunError
from edge_sdk.statistics import Covariance, packed, unpacked
from edge_sdk.tensors import Array


@dataclass(frozen=True, slots=True, eq=False)
class Pooled:
    """One Gaussian a class, as if all features had been in one place (arXiv 2106.05001, appendix A).

    Attributes:
        count: int64 [classes], samples.
        mean: float64 [classes, d]; 0 for a class without samples.
        scatter: float64, about the mean: [classes, d(d+1)/2], packed triangles, or [classes, d], diagonals.
    """

    count: Array
    mean: Array
    scatter: Array

    def gaussians(self, *, shrinkage: float = 0.0) -> Iterator[tuple[int, Array, Array]]:
        """Label, mean float64 [d] and covariance of each class that has a sample.

        The covariance is float64 [d, d], or [d] where only diagonals were sent. It is scatter / (n − 1), and
        (scatter + νW) / (n − 1 + ν) with ``shrinkage`` ν > 0, W = Σ scatter / Σ (n − 1) being the covariance
        within classes. Our reading, as the paper asks for n ≥ 2: one sample has no covariance, and its class
        is given W; W is 0 if no class has two.

        Args:
            shrinkage: as many samples' worth of W enter each class. 0 is the paper's.
        """
        within = self.scatter.sum(axis=0) / max(int(np.maximum(self.count - 1, 0).sum()), 1)
        feature_size = self.mean.shape[1]
        for label in np.flatnonzero(self.count).tolist():
            freedom = int(self.count[label]) - 1
            weight = shrinkage if freedom else 1.0
            covariance = (self.scatter[label] + weight * within) / (freedom + weight)
            if len(covariance) != feature_size:
                covariance = unpacked(covariance, feature_size)
            yield label, self.mean[label], covariance


def pool(reports: Iterable[Mapping[str, Array]], *, covariance: Covariance) -> Pooled:
    """Pool the devices' statistics; they are read one after the other.

    Scatters are joined about their common mean, Σ S_k + Σ n_k (μ_k − μ)(μ_k − μ)ᵀ, two at a time as Chan et
    al. (1979) do, never as a difference of large sums. What ``low_rank`` reports leave out of the
    off-diagonal is missing here too; the rest is exact.

    Args:
        reports: each as :func:`edge_sdk.statistics.class_statistics` makes them and
            :func:`edge_sdk.statistics.check_statistics` passes them. The order changes the last bits: sort
            them where bits matter.
        covariance: what the reports hold.

    Raises:
        RunError: no report, or none that tells of any class.
    """
    count = mean = scatter = None
    for report in reports:
        if count is None or mean is None or scatter is None:
            count, mean = np.zeros_like(report["count"]), np.zeros_like(report["mean"])
            scatter = np.zeros((len(count), len(_scatter(report, 0, covariance))))
        for label in np.flatnonzero(report["count"]).tolist():
            ours, theirs = int(count[label]), int(report["count"][label])
            apart = report["mean"][label] - mean[label]
            between = apart**2 if covariance == "diagonal" else packed(np.outer(apart, apart))
            scatter[label] += _scatter(report, label, covariance) + between * (
                ours * theirs / (ours + theirs)
            )
            mean[label] += apart * (theirs / (ours + theirs))
            count[label] += theirs
    if count is None or mean is None or scatter is None or not count.any():
        raise RunError("no device told of any class: lower the size below which classes are withheld")
    return Pooled(count, mean, scatter)


def _scatter(report: Mapping[str, Array], label: int, covariance: Covariance) -> Array:
    scatter: Array = report["scatter"][label]
    if covariance != "low_rank":
        return scatter
    factor = report["factor"][label]
    return packed(factor.T @ factor + np.diag(scatter))
