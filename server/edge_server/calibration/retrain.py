"""Re-training of the last linear layer by cross-entropy, from where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np

from edge_sdk.data import batches
from edge_sdk.errors import TensorError
from edge_sdk.manifest import Manifest
from edge_sdk.tensors import Array, Tensors, check_finite
from edge_server.calibration.virtual import Balance

MOMENTUM = 0.9
FLOOR = 1e-3
"""Added to the variances by which features are whitened, as a share of their mean: the least is noise."""
PRECISION = 1e-10
"""Likewise, as a share of the mean square: float32 features tell no finer differences."""
SMALLEST = 1e-60
"""Likewise, absolute: features that are all 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a classifier is calibrated.

    Args:
        per_class: virtual features a class, M_c; the paper takes up to 2,000. 0 leaves the classifier alone.
        balance: ``equal``, or by ``frequency``; see :func:`edge_server.calibration.virtual_features`.
        shrinkage: of a class's covariance to that within all classes, in samples. Our reading: it counts for
            classes of a few samples alone, to which it brought up to four points of recall.
        epochs: passes over the features.
        lr: learning rate at the start; it falls linearly to 0. The features are whitened: the same one
            suits features of any scale.
        batch_size: features a step.
        weight_decay: pulls towards the current classifier, in whitened coordinates.
        seed: of the draws and the shuffles.

    Raises:
        ValueError: a setting out of its range.
    """

    per_class: int = 1000
    balance: Balance = "equal"
    shrinkage: float = 5.0
    epochs: int = 10
    lr: float = 0.05
    batch_size: int = 64
    weight_decay: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"per_class": 0, "shrinkage": 0, "epochs": 0, "batch_size": 1, "weight_decay": 0, "seed": 0}
        for name, value in least.items():
            if not value <= getattr(self, name) < np.inf:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from {value}")
        if self.balance not in get_args(Balance):
            raise ValueError(f"balance is {self.balance!r}: give one of {', '.join(get_args(Balance))}")
        if not 0 < self.lr <= 100 or self.lr * self.weight_decay > 1:
            raise ValueError(
                f"lr is {self.lr} with weight_decay {self.weight_decay}: give an lr in (0, 100] and a "
                "product of at most 1, above which weights would grow without end"
            )


def retrain(
    head: Mapping[str, Array], manifest: Manifest, features: Array, labels: Array, settings: Settings
) -> Tensors:
    """Fit the classifier to labelled features (arXiv 2106.05001, section 4; our reading of the optimiser).

    Stochastic gradient descent with momentum on the whitened features, in which the problem is well
    conditioned; the change is brought back to the features' own coordinates, where it is added. Classes
    without a label keep their row and take no part in the softmax: without an example of it, a class would
    be unlearned.

    Args:
        head: the tensors that ``manifest.head`` names.
        manifest: of the model.
        features: float ``[N, d]``, virtual or real.
        labels: int ``[N]``, 0 to classes - 1.
        settings: ``epochs``, ``lr``, ``batch_size``, ``weight_decay`` and ``seed`` count here.

    Returns:
        The new head, in the old one's dtypes; the very same bits after 0 epochs or with fewer than two
        classes.

    Raises:
        TensorError: features of another shape than the model's, or values that are not finite.
    """
    if features.shape != (len(labels), manifest.feature_size):
        raise TensorError(
            f"features are {list(features.shape)}, expected {[len(labels), manifest.feature_size]}"
        )
    check_finite({**head, "features": features})
    present, targets = np.unique(labels, return_inverse=True)
    if len(present) < 2 or settings.epochs == 0:
        return dict(head)
    weight_name, *bias_name = manifest.head
    x = features.astype(np.float64)
    # Without a bias there is nothing that could take a shift back.
    centre = x.mean(axis=0) if bias_name else np.zeros(manifest.feature_size)
    whitening = _whitening(x, centre)
    logits = x @ head[weight_name][present].astype(np.float64).T
    whitened = (x - centre) @ whitening
    if bias_name:
        logits += head[bias_name[0]][present]
        whitened = np.column_stack([whitened, np.ones(len(x))])
    change = _fit(whitened, logits, targets, settings)
    of_weight = change[:, : manifest.feature_size] @ whitening.T
    changes = [of_weight, change[:, -1] - of_weight @ centre]
    return {
        name: _moved(head[name], present, moved)
        for name, moved in zip(manifest.head, changes[: len(manifest.head)], strict=True)
    }


def _whitening(x: Array, centre: Array) -> Array:
    """T [d, d], by which (x − centre) T has a second moment near the identity."""
    apart = x - centre
    values, vectors = np.linalg.eigh(apart.T @ apart / len(x))
    values = np.maximum(values, 0.0)
    floor = FLOOR * values.mean() + PRECISION * (x**2).mean() + SMALLEST
    whitening: Array = vectors / np.sqrt(values + floor)
    return whitening


def _fit(whitened: Array, logits: Array, targets: Array, settings: Settings) -> Array:
    """The change D [classes, width] that minimises the cross-entropy of logits + whitened Dᵀ."""
    change = np.zeros((logits.shape[1], whitened.shape[1]))
    velocity = np.zeros_like(change)
    count, epochs = len(whitened), settings.epochs
    steps = epochs * -(-count // settings.batch_size)
    plan = batches(count, batch_size=settings.batch_size, epochs=epochs, seed=settings.seed)
    for step, batch in enumerate(plan):
        z = whitened[batch]
        scores = logits[batch] + z @ change.T
        residual = np.exp(scores - scores.max(axis=1, keepdims=True))
        residual /= residual.sum(axis=1, keepdims=True)
        residual[np.arange(len(batch)), targets[batch]] -= 1.0
        velocity = MOMENTUM * velocity + residual.T @ z / len(batch) + settings.weight_decay * change
        change -= settings.lr * (1 - step / steps) * velocity
    return change


def _moved(tensor: Array, rows: Array, by: Array) -> Array:
    moved = tensor.astype(np.float64)
    moved[rows] += by
    return moved.astype(tensor.dtype)
