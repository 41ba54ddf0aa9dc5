"""One file with a device's share: NumPy's ``.npz`` with the keys ``images`` and ``labels``."""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from edge_sdk.data.dataset import ArrayDataset, Dataset
from edge_sdk.errors import DataError
from edge_sdk.files import write_atomically
from edge_sdk.tensors import Array

MAX_BYTES = 1 << 32
# DEFLATE cannot expand by more, so a small file cannot make us allocate much.
_MAX_EXPANSION = 1032
# By which NumPy writes; the others expand by more.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# What zipfile raises, and what NumPy's evaluation of a header does.
_UNREADABLE = (OSError, zipfile.BadZipFile, EOFError, zlib.error, RuntimeError, ValueError)
_UNUSABLE = (ValueError, TypeError, tokenize.TokenError, SyntaxError, OverflowError, MemoryError)


def load_npz(path: Path) -> ArrayDataset:
    """Read ``images`` and ``labels``. Nothing is unpickled, and sizes are checked before they are allocated.

    Raises:
        DataError: unreadable, no npz, a key missing, a pickle in it, an array that is not as declared, over
            4 GiB, compressed by another method than DEFLATE, or not what :class:`ArrayDataset` takes
            (float64 images become float32).
    """
    try:
        with zipfile.ZipFile(path) as archive:
            images, labels = (_read(path, archive, key) for key in ("images", "labels"))
    except _UNREADABLE as error:
        raise DataError(f"{path}: not a readable .npz file ({error})") from None
    try:
        with np.errstate(over="ignore"):
            return ArrayDataset(images.astype(np.float32) if images.dtype == np.float64 else images, labels)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def save_npz(path: str | os.PathLike[str], dataset: Dataset) -> None:
    """Write a data set as one ``.npz`` file, whole or not at all; the same examples give the same bytes.

    Args:
        path: the file; its name ends in ``.npz``.
        dataset: at least one example; images all of one shape and dtype (uint8, or floats as float32).

    Raises:
        DataError: another suffix, no examples, or images that differ in shape or dtype.
    """
    target = Path(path)
    if target.suffix != ".npz":
        raise DataError(f"{target}: the name of the file must end in .npz")
    if len(dataset) == 0:
        raise DataError(f"{target}: no examples to write")
    arrays = dataset if isinstance(dataset, ArrayDataset) else _stacked(target, dataset)
    buffer = io.BytesIO()
    np.savez(buffer, images=arrays.images, labels=arrays.labels)
    write_atomically(target, buffer.getvalue())


def _read(path: Path, archive: zipfile.ZipFile, key: str) -> Array:
    try:
        info = archive.getinfo(f"{key}.npy")
    except KeyError:
        raise DataError(f"{path}: has no array {key!r}; it needs 'images' and 'labels'") from None
    if info.compress_type not in _METHODS:
        raise DataError(f"{path}: array {key!r} is not compressed as NumPy does it: write it with np.savez")
    if info.file_size > min(MAX_BYTES, info.compress_size * _MAX_EXPANSION):
        raise DataError(f"{path}: array {key!r} declares {info.file_size} bytes, more than it can hold")
    try:
        with archive.open(info) as file:
            version = npy.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"format version {version}")
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read_header(file)
            data = info.file_size - file.tell()
        if dtype.hasobject:
            raise ValueError("it holds a pickle, which is never loaded")
        if math.prod(shape) * dtype.itemsize != data:
            raise ValueError(f"it declares {dtype} {list(shape)} but holds {data} bytes")
        with archive.open(info) as file:
            return np.asarray(npy.read_array(file, allow_pickle=False))
    except _UNUSABLE as error:
        raise DataError(f"{path}: array {key!r} cannot be used: {error}") from None


def _stacked(path: Path, dataset: Dataset) -> ArrayDataset:
    examples = [dataset[index] for index in range(len(dataset))]
    images = [np.asarray(image) for image, _ in examples]
    images = [image.astype(np.float32) if image.dtype.kind == "f" else image for image in images]
    for index, image in enumerate(images):
        if image.shape != images[0].shape or image.dtype != images[0].dtype:
            raise DataError(
                f"{path}: example {index} is {image.dtype} {list(image.shape)}, "
                f"example 0 {images[0].dtype} {list(images[0].shape)}; one file holds one shape and dtype"
            )
    return ArrayDataset(np.stack(images), np.asarray([label for _, label in examples]))
