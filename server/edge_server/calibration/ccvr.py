"""Classifier calibration with virtual representations (CCVR; Luo et al., arXiv 2106.05001)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edge_sdk.manifest import Manifest
from edge_sdk.statistics import Covariance
from edge_sdk.tensors import Array, Tensors
from edge_server.calibration.pool import pool
from edge_server.calibration.retrain import Settings, retrain
from edge_server.calibration.virtual import virtual_features


def calibrate(
    weights: Mapping[str, Array],
    manifest: Manifest,
    reports: Iterable[Mapping[str, Array]],
    *,
    covariance: Covariance,
    settings: Settings,
) -> Tensors:
    """Re-train the classifier on virtual features drawn from what devices told of theirs.

    Use it after training, once, where labels are skewed over devices: it mends the classifier's bias and
    leaves the extractor as it is. Diagonal covariances mend a strong bias only in part and can do harm where
    there is little; ``low_rank`` with a rank of 16 came within half a point of ``full``.

    Args:
        weights: of the whole model, with which devices made their statistics.
        manifest: of the model.
        reports: the devices' statistics; see :func:`edge_server.calibration.pool`.
        covariance: what the reports hold.
        settings: how many features, and how the classifier is fitted to them.

    Returns:
        The weights, of which the head alone is new. Bits agree on one machine; on another, eigenvalues and
        matrix products may round otherwise.

    Raises:
        RunError: no report tells of any class.
        TensorError: weights that are not finite.
    """
    pooled = pool(reports, covariance=covariance)
    features, labels = virtual_features(
        pooled,
        per_class=settings.per_class,
        balance=settings.balance,
        seed=settings.seed,
        shrinkage=settings.shrinkage,
    )
    return calibrate_on(weights, manifest, features, labels, settings)


def calibrate_on(
    weights: Mapping[str, Array], manifest: Manifest, features: Array, labels: Array, settings: Settings
) -> Tensors:
    """Re-train the classifier on given features: with real ones, the paper's upper bound.

    See :func:`edge_server.calibration.retrain` and :func:`edge_server.calibration.real_features`.
    """
    head = {name: weights[name] for name in manifest.head}
    return dict(weights) | retrain(head, manifest, features, labels, settings)
