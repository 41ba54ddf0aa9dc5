"""The input pipeline of the papers on federated CIFAR-10, which is that of TensorFlow's tutorial.

Hsu et al. (arXiv 1909.06335) and McMahan et al. (arXiv 1602.05629) cut 24 x 24 pixels out of 32 x 32, mirror
half of the images, and standardise each. The tutorial's random brightness and contrast are left out:
standardising takes back the one altogether and the other but for the colours' balance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from edge_sdk.manifest import Pipeline
from edge_sdk.tensors import Array


def apply_pipeline(
    images: Array, pipeline: Pipeline, crop: Sequence[int], rng: np.random.Generator | None
) -> Array:
    """Cut out, mirror and standardise images.

    Args:
        images: float32 ``[n, C, H, W]``, at least as large as the crop.
        pipeline: what to do.
        crop: height and width to cut out.
        rng: draws rows, columns and flips, one of each for every image; None takes the middle (the upper
            left one of the middles) and mirrors nothing.

    Returns:
        float32 ``[n, C, *crop]``; ``images`` may have been changed.
    """
    height, width = crop
    spare = (images.shape[2] - height, images.shape[3] - width)
    if rng is None:
        top, left = spare[0] // 2, spare[1] // 2
        images = images[:, :, top : top + height, left : left + width]
    else:
        images = _anywhere(images, spare, pipeline.flip, rng)
    return standardise(images) if pipeline.standardise else np.ascontiguousarray(images)


def standardise(images: Array) -> Array:
    """``(x - mean) / max(deviation, 1 / sqrt(pixels))`` of each image, over its channels and pixels.

    That is ``tf.image.per_image_standardization``: an image of one grey becomes 0.

    Args:
        images: float32 ``[n, C, H, W]``.
    """
    # In float64, so that neither the order of a sum nor an image of large numbers matters.
    centred = images - images.mean((1, 2, 3), np.float64, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean((1, 2, 3), keepdims=True))
    centred /= np.maximum(deviation, 1 / math.sqrt(math.prod(images.shape[1:])))
    standardised: Array = centred.astype(np.float32)
    return standardised


def _anywhere(images: Array, spare: Sequence[int], flip: bool, rng: np.random.Generator) -> Array:
    count, _, height, width = images.shape
    top, left = (rng.integers(0, extra + 1, count) for extra in spare)
    windows = np.lib.stride_tricks.sliding_window_view(
        images, (height - spare[0], width - spare[1]), axis=(2, 3)
    )
    # Indices on both sides of a slice put their axis first: [n, C, height, width].
    cut: Array = windows[np.arange(count), :, top, left]
    if flip:
        mirrored = rng.random(count) < 0.5
        cut[mirrored] = cut[mirrored, ..., ::-1]
    return cut
