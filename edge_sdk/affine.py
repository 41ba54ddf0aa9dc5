"""Pictures under random shift, rotation, shear and zoom, in numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edge_sdk.tensors import Array

# Our reading: Astraea (arXiv 1907.01132, section III-C) names the four and gives no ranges.
SHIFT = 0.1
"""Largest shift, as a share of the picture's side."""
ROTATION = 15.0
"""Largest rotation, in degrees."""
SHEAR = 0.2
"""Largest shear, in columns a row."""
ZOOM = 0.1
"""Largest difference of the zoom from 1."""
_MOST_CHANNELS = 4
# Values warped at a time: what a warp holds beside its result stays below some 30 MB.
_AT_A_TIME = 1 << 18


class Affine(NamedTuple):
    """For n pictures, where each output pixel comes from: input = ``matrix`` · output + ``offset``.

    Coordinates are (row, column) in pixels, from the middle of the first one: what
    ``scipy.ndimage.affine_transform`` takes.
    """

    matrix: Array
    """float64 ``[n, 2, 2]``."""
    offset: Array
    """float64 ``[n, 2]``."""


def affine(*, shift: Array, rotation: Array, shear: Array, zoom: Array, size: tuple[int, int]) -> Affine:
    """Zoom, shear, rotate about the picture's middle, then shift.

    Args:
        shift: down and to the right, as a share of the height and the width, ``[n, 2]``.
        rotation: degrees, counter-clockwise as one looks at the picture, ``[n]``.
        shear: columns to the right for each row down, ``[n]``.
        zoom: above 1 makes what is shown larger, ``[n]``.
        size: height and width in pixels.
    """
    angle = np.deg2rad(rotation)
    cos, sin = np.cos(angle), np.sin(angle)
    rows = np.stack([cos, sin], axis=-1)
    columns = np.stack([-sin, cos], axis=-1) - np.asarray(shear)[:, None] * rows
    matrix = np.stack([rows, columns], axis=1) / np.asarray(zoom)[:, None, None]
    middle = (np.array(size) - 1) / 2
    centre = middle + np.asarray(shift) * np.array(size)
    # Element by element: a BLAS may give other bits on another machine.
    offset = middle - (matrix[:, :, 0] * centre[:, :1] + matrix[:, :, 1] * centre[:, 1:])
    return Affine(matrix, offset)


def randomly_warped(images: Array, seeds: Sequence[Sequence[int]]) -> Array:
    """Each picture under a transformation drawn from its own seed, uniform in the ranges above.

    Args:
        images: uint8 or float32 ``[n, H, W]``, ``[n, H, W, C]``, or ``[n, C, H, W]`` where C is at most 4
            and below W.
        seeds: of numpy's generator, one a picture.

    Returns:
        The same shape and dtype.
    """
    first, last = images.shape[1], images.shape[-1]
    channels_first = images.ndim == 4 and first <= _MOST_CHANNELS and first < last
    if images.ndim == 3:
        pictures = images[..., None]
    else:
        pictures = images.transpose(0, 2, 3, 1) if channels_first else images
    result = np.empty(pictures.shape, pictures.dtype)
    step = max(1, _AT_A_TIME // max(1, result[:1].size))
    for start in range(0, len(result), step):
        rows = slice(start, start + step)
        result[rows] = warp(pictures[rows], random_affine(seeds[rows], pictures.shape[1:3]))
    restored: Array = result.transpose(0, 3, 1, 2) if channels_first else result.reshape(images.shape)
    return restored


def random_affine(seeds: Sequence[Sequence[int]], size: tuple[int, int]) -> Affine:
    """One transformation for each seed, uniform in the ranges above; the same seed gives the same one."""
    draws = np.array([np.random.default_rng(seed).uniform(-1, 1, 5) for seed in seeds]).reshape(-1, 5)
    return affine(
        shift=draws[:, :2] * SHIFT,
        rotation=draws[:, 2] * ROTATION,
        shear=draws[:, 3] * SHEAR,
        zoom=1 + draws[:, 4] * ZOOM,
        size=size,
    )


def warp(images: Array, transformation: Affine) -> Array:
    """Each picture under its own transformation, bilinear; outside, the nearest edge goes on.

    Args:
        images: uint8 or float32 ``[n, H, W, C]``.
        transformation: of n pictures.

    Returns:
        The same shape and dtype; uint8 is rounded to the nearest.
    """
    count, height, width, channels = images.shape
    matrix, offset = transformation.matrix[:, :, :, None], transformation.offset[:, :, None]
    rows, columns = (
        np.clip(
            (matrix[:, axis, 0] * np.arange(height) + offset[:, axis])[:, :, None]
            + (matrix[:, axis, 1] * np.arange(width))[:, None, :],
            0,
            size - 1,
        )
        for axis, size in enumerate((height, width))
    )
    top, left = rows.astype(np.intp), columns.astype(np.intp)
    down = (rows - top).astype(np.float32)[..., None]
    across = (columns - left).astype(np.float32)[..., None]
    right = np.minimum(left + 1, width - 1)
    upper = (np.arange(count) * height)[:, None, None] + top
    lower = upper + (top < height - 1)
    pixels = images.reshape(-1, channels)

    def along(row: Array) -> Array:
        start = pixels.take(row * width + left, axis=0).astype(np.float32)
        end = pixels.take(row * width + right, axis=0).astype(np.float32)
        mixed: Array = start + (end - start) * across
        return mixed

    warped: Array = along(upper)
    warped += (along(lower) - warped) * down
    return np.rint(warped).astype(np.uint8) if images.dtype == np.uint8 else warped
