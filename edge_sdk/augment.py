"""More examples of rare classes, made on the device (Astraea, arXiv 1907.01132, section III-C)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_sdk.affine import randomly_warped
from edge_sdk.data import ArrayDataset, Dataset
from edge_sdk.data.labels import label_of, labels_of
from edge_sdk.errors import DataError
from edge_sdk.tensors import Array

MAX_COPIES = 1 << 20
"""More copies than any device trains on: a mistaken multiple must not fill its memory."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Augmented:
    """A data set followed by transformed copies of some of its examples, which keep their labels.

    Make one with :func:`augmented`.

    Args:
        dataset: the originals; they keep their indices and are not copied.
        originals: how many they are, so that a data set that grows moves no index.
        sources: the original of each copy, int64 ``[copies]``.
        numbers: which copy of its original, from 1, int64 ``[copies]``.
        labels: of the copies, int64 ``[copies]``.
        seed: of the transformations.
        images: the copies, where they are stored.
    """

    dataset: Dataset
    originals: int
    sources: Array
    numbers: Array
    labels: Array
    seed: int
    images: Sequence[Array] | None = None

    def __len__(self) -> int:
        return self.originals + len(self.sources)

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index}: the data set has only {len(self)} examples")
        if index < self.originals:
            return self.dataset[index]
        copy = index - self.originals
        label = int(self.labels[copy])
        if self.images is not None:
            return self.images[copy], label
        image = _pixels(self.dataset, int(self.sources[copy]))
        rows = slice(copy, copy + 1)
        return _transformed(image[None], self.sources[rows], self.numbers[rows], self.seed)[0], label

    def label_at(self, index: int, /) -> int:
        """The label of the example at ``index``, without making a copy's image."""
        if index < self.originals:
            return label_of(self.dataset, index)
        return int(self.labels[index - self.originals])

    @property
    def nbytes(self) -> int:
        """Memory that the stored copies take, in bytes; 0 where they are made on the fly."""
        return 0 if self.images is None else sum(image.nbytes for image in self.images)


def augmented(
    dataset: Dataset,
    indices: Array,
    *,
    multiples: Mapping[int, float],
    classes: int,
    seed: int,
    stored: bool = True,
) -> tuple[Dataset, Array]:
    """Add copies of ``dataset[indices]`` under random shift, rotation, shear and zoom.

    An example whose class has multiple m gets floor(m) - 1 copies and one more with probability
    m - floor(m). What an example's copies look like depends on the seed and its index alone.

    Stored, as in the paper, the copies cost their bytes for as long as the data set lives (see
    :attr:`Augmented.nbytes`; an image of floats four times one of bytes). On the fly they cost the
    transformation at each access (about 0.3 ms for 32 x 32 colour pixels on one core of a
    server) and the original is read again: choose it where memory is short. Both give the same pixels.

    A copy is uint8 where its original has integer pixels, else float32. Its shape is the original's:
    ``[H, W]``, ``[H, W, C]``, or ``[C, H, W]`` where the first axis is at most 4 and shorter than the last.

    Args:
        dataset: where the originals come from.
        indices: which of them to train on, int ``[n]``; each index once.
        multiples: target multiple of a class, at least 1; 1 where a class is absent.
        classes: count of classes.
        seed: not negative.
        stored: make the copies now and keep them.

    Returns:
        The data set and the indices to train on, ``indices`` first. The very arguments where nothing is to
        be added.

    Raises:
        DataError: a multiple below 1, not finite, or of a class that there is not; a negative seed; over
            2^20 copies; an example to copy that has no picture or no valid label.
    """
    for label, multiple in multiples.items():
        if not (0 <= label < classes and 1 <= multiple < math.inf):
            raise DataError(
                f"class {label} cannot have {multiple} times its examples: classes are 0 to {classes - 1}, "
                "multiples finite and at least 1"
            )
    if seed < 0:
        raise DataError(f"cannot augment with seed {seed}: it must be at least 0")
    if not any(multiple > 1 for multiple in multiples.values()):
        return dataset, indices
    chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
    labels = labels_of(dataset, chosen, classes)
    counts = _copies(chosen, labels, multiples, seed)
    if not counts.any():
        return dataset, indices
    sources = np.repeat(chosen, counts)
    numbers = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    images = _stored(dataset, sources, numbers, seed) if stored else None
    result = Augmented(
        dataset=dataset,
        originals=len(dataset),
        sources=sources,
        numbers=numbers,
        labels=np.repeat(labels, counts),
        seed=seed,
        images=images,
    )
    return result, np.concatenate([chosen, np.arange(result.originals, len(result))])


def _copies(chosen: Array, labels: Array, multiples: Mapping[int, float], seed: int) -> Array:
    """How many copies of each example, int64 ``[n]``."""
    wanted = np.array([multiples.get(label, 1.0) - 1 for label in labels.tolist()], np.float64)
    whole = np.floor(wanted)
    if whole.sum() > MAX_COPIES:
        raise DataError(
            f"augmentation asks for {whole.sum():.3g} copies, at most {MAX_COPIES} are made: lower its alpha"
        )
    fractions = wanted - whole
    for row in np.flatnonzero(fractions).tolist():
        # Copies are numbered from 1, so 0 is free for this draw.
        whole[row] += np.random.default_rng([seed, int(chosen[row]), 0]).random() < fractions[row]
    return whole.astype(np.int64)


def _stored(dataset: Dataset, sources: Array, numbers: Array, seed: int) -> list[Array]:
    if isinstance(dataset, ArrayDataset):
        return list(_transformed(dataset.images[sources], sources, numbers, seed))
    images: list[Array] = []
    # The copy with number 1 begins the run of one example's copies, for which it is read once.
    starts = np.flatnonzero(numbers == 1).tolist()
    for start, stop in zip(starts, [*starts[1:], len(sources)], strict=True):
        image = _pixels(dataset, int(sources[start]))
        repeated = np.broadcast_to(image, (stop - start, *image.shape))
        images.extend(_transformed(repeated, sources[start:stop], numbers[start:stop], seed))
    return images


def _transformed(images: Array, sources: Array, numbers: Array, seed: int) -> Array:
    finite = np.isfinite(images).all(axis=tuple(range(1, images.ndim)))
    if not finite.all():
        raise DataError(f"example {sources[np.argmin(finite)]}: its image holds NaN or infinite pixels")
    seeds = [[seed, *pair] for pair in zip(sources.tolist(), numbers.tolist(), strict=True)]
    return randomly_warped(images, seeds)


def _pixels(dataset: Dataset, index: int) -> Array:
    """The image of an example, uint8 where it has integer pixels, else float32."""
    image: Any = dataset[index][0]
    # A palette image as an array is indices into colours, not colours.
    if getattr(image, "mode", None) == "P":
        image = image.convert("RGB")
    try:
        pixels = np.asarray(image)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"example {index}: its image is no array of numbers ({error})") from None
    if pixels.ndim not in (2, 3) or pixels.size == 0:
        raise DataError(
            f"example {index}: image has shape {list(pixels.shape)}, expected [H, W] or [H, W, C]"
        )
    if pixels.dtype.kind in "ui":
        if pixels.min() < 0 or pixels.max() > 255:
            raise DataError(f"example {index}: integer pixels must lie in 0 to 255; use floats for others")
        return pixels.astype(np.uint8)
    if pixels.dtype.kind not in "fb":
        raise DataError(f"example {index}: pixels are {pixels.dtype}, expected uint8 or float32")
    # A float64 beyond float32 becomes infinite, which is reported before the warp.
    with np.errstate(over="ignore"):
        return pixels.astype(np.float32)
