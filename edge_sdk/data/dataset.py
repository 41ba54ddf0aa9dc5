"""What a device's labelled images look like to the SDK, and which of them are held out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array


@runtime_checkable
class Dataset(Protocol):
    """Anything with a length that gives ``(image, label)`` for an index, a PyTorch data set for one.

    The image is ``[H, W]`` or ``[H, W, C]``, the label an int from 0.
    """

    def __len__(self) -> int:
        """Count of examples."""

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """The example at ``index``, from 0."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayDataset:
    """Images and labels in memory.

    Args:
        images: uint8 or float32 ``[N, H, W]`` or ``[N, H, W, C]``.
        labels: any integer dtype ``[N]``.

    Raises:
        DataError: the arrays have other dimensions, dtypes, or lengths that differ.
    """

    images: Array
    labels: Array

    def __post_init__(self) -> None:
        images, labels = np.asarray(self.images), np.asarray(self.labels)
        if images.ndim not in (3, 4) or images.dtype not in (np.uint8, np.float32):
            raise DataError(
                f"images are {images.dtype} {list(images.shape)}, expected uint8 or float32 "
                "[N, H, W] or [N, H, W, C]"
            )
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(f"labels are {labels.dtype} {list(labels.shape)}, expected integers [N]")
        if len(images) != len(labels):
            raise DataError(f"{len(images)} images but {len(labels)} labels: give one label an image")
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Array, int]:
        return self.images[index], int(self.labels[index])

    def take(self, indices: Array) -> ArrayDataset:
        """The examples at ``indices`` (int ``[n]``), copied, in that order."""
        return ArrayDataset(self.images[indices], self.labels[indices])


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """Examples drawn from an iterable."""

    examples: list[tuple[Any, Any]]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        return self.examples[index]


def as_dataset(source: object) -> Dataset:
    """Make a data set of what an app has.

    What has a length and an index is used as it is. An iterator is drawn to its end, which can be done
    once. What can only be iterated is drawn anew at every call, so that it may grow between rounds.

    Args:
        source: indexable with a length, or an iterable of ``(image, label)``.

    Raises:
        DataError: neither of the two, or a pair of arrays (see :class:`ArrayDataset`).

    >>> len(as_dataset((([[0.0]], label) for label in range(3))))
    3
    """
    if isinstance(source, tuple) and len(source) == 2 and all(isinstance(a, np.ndarray) for a in source):
        raise DataError("a pair of arrays is not a data set: use ArrayDataset(images, labels)")
    if not isinstance(source, (str, bytes, Mapping, set, frozenset)):
        if isinstance(source, Iterator):
            return _Drawn(list(source))
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            return cast(Dataset, source)
        if isinstance(source, Iterable):
            return _Drawn(list(source))
    raise DataError(
        f"a {type(source).__name__} is not a data set: give a sequence with a length, an iterable of "
        "(image, label), or ArrayDataset(images, labels)"
    )


def split_held_out(count: int, fraction: float, seed: int) -> tuple[Array, Array]:
    """Choose which examples a device evaluates on and never trains on.

    One example of each run of about 1/``fraction`` neighbours is held out, picked by a hash of the seed
    and the run's number. The choice does not depend on ``count``: an example keeps its side for ever
    while the data set grows, and no held-out example leaks into training. Example 0 always trains.

    Args:
        count: size of the data set.
        fraction: share to hold out, in [0, 1).
        seed: any int of at most 64 bits.

    Returns:
        Indices to train on and indices held out, int64, ascending. The second may be empty when
        ``count`` is below 1/``fraction``.

    Raises:
        DataError: ``count`` is negative or ``fraction`` outside its range.

    >>> [len(side) for side in split_held_out(100, 0.2, seed=0)]
    [80, 20]
    """
    if count < 0 or not 0 <= fraction < 1:
        raise DataError(f"cannot hold out {fraction} of {count} examples: the fraction must be in [0, 1)")
    if fraction * count == 0:
        return np.arange(count, dtype=np.int64), np.empty(0, np.int64)
    runs = np.arange(int(np.ceil(count * fraction)) + 2)
    starts = np.ceil(runs / fraction).astype(np.int64)
    sizes = np.diff(starts)
    picks = (_hash(seed, runs[:-1]) % sizes.astype(np.uint64)).astype(np.int64)
    # A device with a single example must be able to train on it.
    picks[0] = 1 + picks[0] % (sizes[0] - 1)
    held = starts[:-1] + picks
    held = held[held < count]
    return np.setdiff1d(np.arange(count, dtype=np.int64), held, assume_unique=True), held


def _hash(seed: int, numbers: Array) -> Array:
    """SplitMix64 (Steele et al., OOPSLA 2014) of the seed and each number, uint64."""
    start = _mixed(np.array([seed & (1 << 64) - 1], np.uint64))
    return _mixed(start + numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mixed(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
