"""IDX, the format of MNIST and Fashion-MNIST (yann.lecun.com/exdb/mnist), plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, cast

import numpy as np

from edge_sdk.data.dataset import ArrayDataset
from edge_sdk.errors import DataError
from edge_sdk.tensors import Array

MAX_BYTES = 1 << 31
_PREFIX = {"train": "train", "test": "t10k"}
_UNSIGNED_BYTE = 8
# DEFLATE cannot expand by more, so a small file cannot make us allocate much.
_MAX_EXPANSION = 1032


def read_idx(path: Path) -> Array:
    """Read one IDX file of unsigned bytes, of 1 to 4 dimensions.

    The header is compared with the file's size before anything is allocated.

    Raises:
        DataError: unreadable, not IDX of unsigned bytes, truncated, longer than it says, or over 2 GiB.
    """
    try:
        size = path.stat().st_size
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                return _read(path, cast("IO[bytes]", file), size * _MAX_EXPANSION)
        with path.open("rb") as plain:
            return _read(path, plain, size)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def find_idx(folder: Path, split: str) -> tuple[Path, Path] | None:
    """The image and the label file of a split (``train`` or ``test``), or None where either is missing."""
    found = []
    for name in (f"{_PREFIX[split]}-images-idx3-ubyte", f"{_PREFIX[split]}-labels-idx1-ubyte"):
        path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        if path is None:
            return None
        found.append(path)
    return found[0], found[1]


def load_idx(folder: Path, split: str) -> ArrayDataset:
    """The images uint8 ``[N, H, W]`` and labels of a folder in the layout of MNIST.

    Raises:
        DataError: a file is missing, or as :func:`read_idx`.
    """
    files = find_idx(folder, split)
    if files is None:
        prefix = _PREFIX[split]
        raise DataError(
            f"{folder}: {prefix}-images-idx3-ubyte or {prefix}-labels-idx1-ubyte (or .gz) is missing"
        )
    return ArrayDataset(read_idx(files[0]), read_idx(files[1]))


def _read(path: Path, file: IO[bytes], available: int) -> Array:
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != _UNSIGNED_BYTE or not 1 <= magic[3] <= 4:
        raise DataError(f"{path}: not an IDX file of unsigned bytes (begins with {magic.hex() or 'nothing'})")
    dimensions = magic[3]
    header = file.read(4 * dimensions)
    if len(header) < 4 * dimensions:
        raise DataError(f"{path}: truncated in its header; get the file again")
    shape = struct.unpack(f">{dimensions}I", header)
    declared = math.prod(shape)
    if declared > MAX_BYTES or declared > available:
        raise DataError(f"{path}: its header declares {declared} bytes, more than the file can hold")
    data = file.read(declared + 1)
    if len(data) != declared:
        reason = "is truncated" if len(data) < declared else "goes on"
        raise DataError(f"{path}: {reason} where its header declares {declared} bytes; get the file again")
    values: Array = np.frombuffer(data, np.uint8).reshape(shape).copy()
    return values
