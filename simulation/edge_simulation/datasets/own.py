"""A data set of one's own, from a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_sdk.data import ArrayDataset, Dataset
from edge_sdk.data.cifar import find_cifar, load_cifar
from edge_sdk.data.folder import ImageFolder, class_folders
from edge_sdk.data.idx import find_idx, load_idx
from edge_sdk.data.load import has_class_folders
from edge_sdk.data.npz import load_npz
from edge_sdk.errors import DataError
from edge_simulation.datasets.train_test import TrainTest, held_out

TEST_FRACTION = 0.2
MAX_SIDE = 32


def from_path(path: Path, seed: int) -> TrainTest:
    """The data set at ``path``; see :func:`edge_simulation.datasets.load_train_test`."""
    class_names: tuple[str, ...] = ()
    if path.suffix == ".npz" and path.is_file():
        train, test = _share_held_out(load_npz(path), seed, path)
    elif path.is_dir() and find_idx(path, "train"):
        train, test = load_idx(path, "train"), load_idx(path, "test")
    elif path.is_dir() and find_cifar(path, "train"):
        train, test = load_cifar(path, "train"), load_cifar(path, "test")
    elif has_class_folders(path / "train") and has_class_folders(path / "test"):
        train, test, class_names = _image_splits(path)
    elif has_class_folders(path):
        scanned = _scan(path)
        class_names = scanned.class_names
        train, test = _share_held_out(_decoded(scanned), seed, path)
    else:
        raise DataError(
            f"{path}: unknown layout; expected a .npz with images and labels, a folder in the layout of "
            "MNIST or CIFAR, or one sub-folder of images a class"
        )
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(f"{path}: training and test images differ in shape")
    if len(train) == 0 or len(test) == 0:
        raise DataError(f"{path}: holds no training or no test images")
    lowest = min(train.labels.min(), test.labels.min())
    classes = int(max(train.labels.max(), test.labels.max())) + 1
    if lowest < 0 or classes > len(train) + len(test):
        raise DataError(f"{path}: labels go from {lowest} to {classes - 1}; number the classes from 0")
    classes = max(classes, len(class_names))
    if classes < 2:
        raise DataError(f"{path}: holds one class; at least two are needed")
    return TrainTest(
        path.stem, train, test, classes, class_names or tuple(str(label) for label in range(classes))
    )


def _image_splits(path: Path) -> tuple[ArrayDataset, ArrayDataset, tuple[str, ...]]:
    train = _scan(path / "train")
    if class_folders(path / "train") != class_folders(path / "test"):
        raise DataError(f"{path}: train/ and test/ must have sub-folders of the same names, the classes")
    test = ImageFolder.scan(path / "test", channels=train.channels, size=train.size)
    return _decoded(train), _decoded(test), train.class_names


def _scan(folder: Path) -> ImageFolder:
    """Images as RGB, in the size of the first one or at most 32×32 with its proportions."""
    first, _ = ImageFolder.scan(folder)[0]
    height, width = first.shape[:2]
    shrink = min(1.0, MAX_SIDE / max(height, width))
    size = (max(1, round(height * shrink)), max(1, round(width * shrink)))
    return ImageFolder.scan(folder, size=size)


def _decoded(dataset: Dataset) -> ArrayDataset:
    images, labels = zip(*(dataset[index] for index in range(len(dataset))), strict=True)
    return ArrayDataset(np.stack(images), np.asarray(labels, np.int64))


def _share_held_out(whole: ArrayDataset, seed: int, path: Path) -> tuple[ArrayDataset, ArrayDataset]:
    return held_out(whole, round(len(whole) * TEST_FRACTION), seed, path)
