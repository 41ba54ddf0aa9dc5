"""A device's labels: reading them without their images where that is possible, and counting them."""

from __future__ import annotations

import operator
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edge_sdk.data.dataset import ArrayDataset, Dataset
from edge_sdk.data.folder import ImageFolder
from edge_sdk.errors import DataError
from edge_sdk.tensors import Array


@runtime_checkable
class Labelled(Protocol):
    """A data set that tells a label without making the image: worth its while where images are files."""

    def label_at(self, index: int, /) -> int:
        """The label of the example at ``index``."""


def labels_of(dataset: Dataset, indices: Array, classes: int) -> Array:
    """The labels of ``dataset[indices]``, int64 ``[n]``.

    Images are opened only where the data set is neither one of the SDK's own nor :class:`Labelled`.

    Raises:
        DataError: an index outside the data set, or an example (named by its index) that is no pair or
            whose label is no integer from 0 to ``classes`` - 1.

    >>> labels_of([("an image", 2), ("another", 0)], np.array([1, 0]), classes=3)
    array([0, 2])
    """
    chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
    if outside := chosen[(chosen < 0) | (chosen >= len(dataset))].tolist():
        raise DataError(f"example {outside[0]}: the data set has only {len(dataset)} examples")
    if isinstance(dataset, (ArrayDataset, ImageFolder)):
        labels = dataset.labels[chosen].astype(np.int64)
    else:
        labels = np.array([label_of(dataset, index) for index in chosen.tolist()], np.int64)
    if len(bad := np.flatnonzero((labels < 0) | (labels >= classes))):
        raise DataError(f"example {chosen[bad[0]]}: label {labels[bad[0]]}, expected 0 to {classes - 1}")
    return labels


def label_of(dataset: Dataset, index: int) -> int:
    """The label of one example; -1 where it does not fit 64 bits.

    Raises:
        DataError: the example is no pair, or its label no integer.
    """
    if isinstance(dataset, (ArrayDataset, ImageFolder)):
        return int(dataset.labels[index])
    if isinstance(dataset, Labelled):
        label: Any = dataset.label_at(index)
    else:
        example: Any = dataset[index]
        try:
            _, label = example
        except (TypeError, ValueError):
            raise DataError(f"example {index}: not a pair (image, label)") from None
    try:
        value = operator.index(label)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"example {index}: label {label!r} is not an integer") from None
    return value if abs(value) < 1 << 62 else -1


def histogram(labels: Array, classes: int, *, withhold_below: int = 0) -> Array:
    """How many examples each class has, int64 ``[classes]``.

    Args:
        labels: any integer dtype ``[n]``, each from 0 to ``classes`` - 1.
        classes: count of classes.
        withhold_below: a class with fewer examples is reported as 0, so that a rare one stays private.

    Raises:
        DataError: a label that is no integer or out of range.

    >>> histogram(np.array([0, 0, 0, 2]), 3, withhold_below=2)
    array([3, 0, 0])
    """
    labels = np.asarray(labels)
    if labels.size == 0:
        return np.zeros(classes, np.int64)
    if labels.ndim != 1 or labels.dtype.kind not in "ui" or labels.min() < 0 or labels.max() >= classes:
        raise DataError(
            f"labels are {labels.dtype} {list(labels.shape)}, expected integers 0 to {classes - 1}"
        )
    counts = np.bincount(labels.astype(np.int64), minlength=classes).astype(np.int64)
    counts[counts < withhold_below] = 0
    return counts
