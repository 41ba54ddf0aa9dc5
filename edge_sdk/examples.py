"""What enters a bundle's programs of a device's examples: images, or what a frozen backbone makes of them.

The backbone is nearly all of the work, and its features are the same in every epoch: where examples are
used more than once they are computed once and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from edge_sdk.data import Dataset, prepare
from edge_sdk.errors import BundleError
from edge_sdk.manifest import Backbone, Manifest
from edge_sdk.runtime import Runtime
from edge_sdk.tensors import Array

EVALUATION_BATCH = 256
FROZEN_BATCH = 16
"""Images in one call of a frozen network: some 60 MB of MobileNetV2's maps at 96 pixels a side."""


class Cancelled(Exception):  # noqa: N818 - a request, not an error
    """Training or evaluation was asked to stop between two batches."""


def enter(
    runtime: Runtime,
    manifest: Manifest,
    dataset: Dataset,
    indices: Array,
    *,
    rng: np.random.Generator | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Array, Array]:
    """``dataset[indices]`` as the programs take it.

    Args:
        runtime: of the manifest's bundle; its weights do not matter.
        manifest: says whether there is a backbone.
        dataset: where the examples come from.
        indices: which of them, int ``[n]``.
        rng: of the crops and flips of training; None for none.
        cancelled: asked before each batch that goes through a backbone.

    Returns:
        float32 ``[n, *manifest.entering]`` and labels int64 ``[n]``. Beside them, memory holds the images of
        one small batch where there is a backbone.

    Raises:
        DataError: no examples, or one that does not fit the model.
        BundleError: the backbone gives no finite features of the declared shape.
        Cancelled: ``cancelled()`` became true.
    """
    if manifest.backbone is None:
        return prepare(dataset, indices, manifest.input, manifest.classes, rng=rng)
    features = np.empty((len(indices), *manifest.entering), np.float32)
    labels = np.empty(len(indices), np.int64)
    for start in range(0, max(len(indices), 1), FROZEN_BATCH):
        if cancelled():
            raise Cancelled
        batch = slice(start, start + FROZEN_BATCH)
        images, labels[batch] = prepare(dataset, indices[batch], manifest.input, manifest.classes, rng=rng)
        features[batch] = _checked(runtime.backbone(images), len(images), manifest.backbone)
    return features, labels


def in_order(
    runtime: Runtime,
    manifest: Manifest,
    dataset: Dataset,
    indices: Array,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Array, Array]]:
    """What :func:`enter` gives, batch by batch, each example once. Raises as that does, before each batch."""
    for start in range(0, len(indices), EVALUATION_BATCH):
        if cancelled():
            raise Cancelled
        batch = indices[start : start + EVALUATION_BATCH]
        yield enter(runtime, manifest, dataset, batch, cancelled=cancelled)


class Examples:
    """``dataset[indices]`` to be taken again and again.

    With a backbone its features are computed here, of images that are cropped and flipped once, and kept.
    Without one an image is prepared anew each time that it is taken.

    Args:
        rng: of the crops and flips that the features have; None for none.

    Raises:
        DataError, BundleError, Cancelled: as :func:`enter` does, here where there is a backbone.
    """

    def __init__(
        self,
        runtime: Runtime,
        manifest: Manifest,
        dataset: Dataset,
        indices: Array,
        *,
        rng: np.random.Generator | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._source = (runtime, manifest, dataset)
        self._indices = indices
        self._kept: tuple[Array, Array] | None = None
        if manifest.backbone is not None:
            self._kept = enter(runtime, manifest, dataset, indices, rng=rng, cancelled=cancelled)

    def take(self, chosen: Array, rng: np.random.Generator | None = None) -> tuple[Array, Array]:
        """Some of the examples, by their places in ``indices``.

        Args:
            chosen: int ``[n]``.
            rng: of the crops and flips of images that are prepared anew.
        """
        if self._kept is None:
            return enter(*self._source, self._indices[chosen], rng=rng)
        features, labels = self._kept
        return features[chosen], labels[chosen]


def _checked(features: Array, count: int, declared: Backbone) -> Array:
    if features.shape != (count, *declared.shape) or features.dtype != np.float32:
        raise BundleError(
            f"the bundle's backbone gives {features.dtype} {list(features.shape)} for {count} images, its "
            f"manifest declares float32 {[count, *declared.shape]}"
        )
    if not np.isfinite(features).all():
        raise BundleError("the bundle's backbone gives features that are not finite")
    return features
