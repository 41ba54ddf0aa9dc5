"""CIFAR-10 and CIFAR-100 in their binary version (cs.toronto.edu/~kriz/cifar.html)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_sdk.data.dataset import ArrayDataset
from edge_sdk.errors import DataError
from edge_sdk.tensors import Array

_PIXELS = 3 * 32 * 32
MAX_BYTES = 1 << 31


def find_cifar(folder: Path, split: str) -> tuple[list[Path], int] | None:
    """The files of a split and their count of classes, 10 or 100; None where there are none."""
    tens = sorted(folder.glob("data_batch_*.bin")) if split == "train" else [folder / "test_batch.bin"]
    if tens and tens[0].is_file():
        return tens, 10
    if (hundred := folder / f"{split}.bin").is_file():
        return [hundred], 100
    return None


def load_cifar(folder: Path, split: str) -> ArrayDataset:
    """The images uint8 ``[N, 32, 32, 3]`` and labels of a split; of CIFAR-100 the fine labels.

    Raises:
        DataError: files missing, a size that is no multiple of a record's, or a label out of range.
    """
    found = find_cifar(folder, split)
    if found is None:
        wanted = "data_batch_*.bin or train.bin" if split == "train" else "test_batch.bin or test.bin"
        raise DataError(f"{folder}: holds no {wanted} (the binary version of CIFAR)")
    files, classes = found
    parts = [_read(path, classes) for path in files]
    return ArrayDataset(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]))


def _read(path: Path, classes: int) -> tuple[Array, Array]:
    # CIFAR-100 has a coarse label before the fine one.
    labels = 1 if classes == 10 else 2
    record = labels + _PIXELS
    try:
        size = path.stat().st_size
        if size == 0 or size % record or size > MAX_BYTES:
            raise DataError(f"{path}: {size} bytes are not whole records of {record}; get the file again")
        records = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    records = records.reshape(-1, record)
    found = records[:, labels - 1].astype(np.int64)
    if found.max() >= classes:
        raise DataError(f"{path}: holds label {found.max()}, expected 0 to {classes - 1}")
    images = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), found
