"""From a device's examples to the arrays that a training step takes."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np

from edge_sdk.data.dataset import ArrayDataset, Dataset
from edge_sdk.data.pipeline import apply_pipeline
from edge_sdk.errors import DataError
from edge_sdk.manifest import Input
from edge_sdk.tensors import Array


def prepare(
    dataset: Dataset,
    indices: Array,
    input: Input,
    classes: int,
    *,
    rng: np.random.Generator | None = None,
) -> tuple[Array, Array]:
    """Read examples, check them against the model and normalise them.

    An image is ``[H, W]`` (one channel), ``[H, W, C]``, or ``[C, H, W]`` where only that fits: an array, a
    Pillow image or nested lists. Integer pixels must lie in 0 to 255 and are divided by 255; floats are
    taken as they are. Then ``(x - mean) / std`` for each channel. Where the input has a pipeline, the model's
    ``[H, W]`` is cut out of the image, mirrored and standardised as that says.

    Args:
        dataset: where the examples come from.
        indices: which of them, int ``[n]``.
        input: the model's input, from the bundle's manifest.
        classes: count of classes; labels are 0 to ``classes`` - 1.
        rng: of the crops and flips of training; None cuts out the middle and mirrors nothing.

    Returns:
        Images float32 ``[n, C, H, W]`` and labels int64 ``[n]``.

    Raises:
        DataError: no examples, or one (named by its index) whose image has another shape, pixels that are
            not numbers, not finite or out of range, or whose label is no integer or out of range.
    """
    chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
    count = len(dataset)
    if count == 0 or len(chosen) == 0:
        raise DataError("the data set is empty: give at least one (image, label) example")
    if outside := chosen[(chosen < 0) | (chosen >= count)].tolist():
        raise DataError(f"example {outside[0]}: the data set has only {count} examples")
    if isinstance(dataset, ArrayDataset):
        images, labels = _from_arrays(dataset, chosen, input)
    else:
        images, labels = _one_by_one(dataset, chosen, input)
    if len(bad := np.flatnonzero((labels < 0) | (labels >= classes))):
        raise DataError(
            f"example {chosen[bad[0]]}: label {labels[bad[0]]}, expected 0 to {classes - 1} "
            f"(the model has {classes} classes)"
        )
    images -= np.asarray(input.mean, np.float32)[:, None, None]
    images /= np.asarray(input.std, np.float32)[:, None, None]
    finite = np.isfinite(images).all(axis=(1, 2, 3))
    if not finite.all():
        raise DataError(f"example {chosen[np.argmin(finite)]}: its image holds NaN or infinite pixels")
    if input.pipeline is not None:
        images = apply_pipeline(images, input.pipeline, input.shape[1:], rng)
    return images, labels


def batches(count: int, *, batch_size: int, epochs: int, seed: int, first: int = 0) -> Iterator[Array]:
    """Indices of every batch of local training: each epoch is a fresh permutation, seeded by its number.

    The last batch of an epoch keeps what is left, so every example is seen once an epoch.

    Args:
        count: examples trained on.
        batch_size: examples a batch, at least 1.
        epochs: passes over the examples.
        seed: the same seed gives the same batches; not negative.
        first: number of the first epoch.

    Yields:
        int64 ``[batch_size]``, or fewer at the end of an epoch, into 0 to ``count`` - 1.

    Raises:
        DataError: ``count`` or ``batch_size`` below 1, ``epochs`` or ``seed`` below 0.

    >>> [len(batch) for batch in batches(5, batch_size=2, epochs=1, seed=0)]
    [2, 2, 1]
    """
    if count < 1 or batch_size < 1 or epochs < 0 or seed < 0:
        raise DataError(
            f"cannot make batches of {batch_size} from {count} examples over {epochs} epochs with seed "
            f"{seed}: examples and batch size must be at least 1, epochs and seed at least 0"
        )
    return (
        order[start : start + batch_size]
        for epoch in range(first, first + epochs)
        for order in [np.random.default_rng([seed, epoch]).permutation(count)]
        for start in range(0, count, batch_size)
    )


def _from_arrays(dataset: ArrayDataset, chosen: Array, input: Input) -> tuple[Array, Array]:
    axes = _axes(dataset.images.shape[1:], input, int(chosen[0]))
    gathered = dataset.images[chosen]
    gathered = gathered[:, None] if axes is None else gathered.transpose(0, *(axis + 1 for axis in axes))
    # A fresh array: the caller's own images must not be normalised in place.
    images = np.array(gathered, dtype=np.float32, order="C")
    if gathered.dtype == np.uint8:
        images /= np.float32(255)
    return images, dataset.labels[chosen].astype(np.int64)


def _one_by_one(dataset: Dataset, chosen: Array, input: Input) -> tuple[Array, Array]:
    images = np.empty((len(chosen), *input.image_shape), np.float32)
    labels = np.empty(len(chosen), np.int64)
    for row, index in enumerate(chosen.tolist()):
        example: Any = dataset[index]
        try:
            image, label = example
        except (TypeError, ValueError):
            raise DataError(f"example {index}: not a pair (image, label)") from None
        pixels = _pixels(image, index)
        axes = _axes(pixels.shape, input, index)
        images[row] = pixels[None] if axes is None else pixels.transpose(axes)
        labels[row] = _label(label, index)
    return images, labels


def _pixels(image: Any, index: int) -> Array:
    # A palette image as an array is indices into colours, not colours.
    if getattr(image, "mode", None) == "P":
        image = image.convert("RGB")
    try:
        pixels = np.asarray(image)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"example {index}: its image is no array of numbers ({error})") from None
    if pixels.dtype.kind in "ui":
        if pixels.size and (pixels.min() < 0 or pixels.max() > 255):
            raise DataError(f"example {index}: integer pixels must lie in 0 to 255; use floats for others")
        scaled: Array = pixels.astype(np.float32) / np.float32(255)
        return scaled
    if pixels.dtype.kind not in "fb":
        raise DataError(f"example {index}: pixels are {pixels.dtype}, expected uint8 or float32")
    # A float64 beyond float32 becomes infinite, which is reported with the example's index.
    with np.errstate(over="ignore"):
        return pixels.astype(np.float32)


def _axes(shape: tuple[int, ...], input: Input, index: int) -> tuple[int, int, int] | None:
    """The transposition to channels first; None where the channel axis is still to be added."""
    channels, height, width = input.image_shape
    if shape == (height, width) and channels == 1:
        return None
    if shape == (height, width, channels):
        return 2, 0, 1
    if shape == (channels, height, width):
        return 0, 1, 2
    expected = f"[{height}, {width}]" if channels == 1 else f"[{height}, {width}, {channels}]"
    raise DataError(f"example {index}: image has shape {list(shape)}, expected {expected}")


def _label(label: Any, index: int) -> int:
    try:
        value = operator.index(label)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"example {index}: label {label!r} is not an integer") from None
    # Beyond 64 bits it cannot be stored; -1 is out of every range and is reported as such.
    return value if abs(value) < 1 << 62 else -1
