"""One call for every layout of data on disk."""

from __future__ import annotations

import os
from pathlib import Path

from edge_sdk.data.cifar import find_cifar, load_cifar
from edge_sdk.data.dataset import Dataset
from edge_sdk.data.folder import ImageFolder, class_folders, images_in
from edge_sdk.data.idx import find_idx, load_idx
from edge_sdk.data.npz import load_npz
from edge_sdk.errors import DataError
from edge_sdk.manifest import Input

_SPLITS = ("train", "test")
_LAYOUTS = (
    "expected a .npz with images and labels, or a folder with IDX files (train-images-idx3-ubyte[.gz] …), "
    "CIFAR's binary files (data_batch_1.bin … or train.bin), or one sub-folder of images a class"
)


def load(path: str | os.PathLike[str], *, split: str = "train", input: Input | None = None) -> Dataset:
    """Open the data at ``path``, whichever layout it has: ``.npz``, IDX, CIFAR binary, image folders.

    Args:
        path: a file or a folder.
        split: ``train`` or ``test``, of a layout that holds both. A ``.npz``, and image folders without
            ``train/`` and ``test/`` above them, have one part, which is what the caller takes it for.
        input: the model's input: image files are resized and converted to the images that it takes.
            Without it they come as they are, in RGB.

    Raises:
        DataError: nothing there, none of the layouts, no such split, or a damaged file.
    """
    if split not in _SPLITS:
        raise DataError(f"split {split!r} is unknown: use 'train' or 'test'")
    root = Path(path)
    if root.is_file() and root.suffix == ".npz":
        return load_npz(root)
    if not root.exists():
        raise DataError(f"{root}: no such file or folder; {_LAYOUTS}")
    if root.is_dir():
        if any(find_idx(root, each) for each in _SPLITS):
            return load_idx(root, split)
        if any(find_cifar(root, each) for each in _SPLITS):
            return load_cifar(root, split)
        if has_class_folders(root / "train"):
            return _images(root / split, input)
        if has_class_folders(root):
            return _images(root, input)
    raise DataError(f"{root}: unknown layout; {_LAYOUTS}")


def has_class_folders(folder: Path) -> bool:
    """Whether ``folder`` has a sub-folder with image files in it."""
    return folder.is_dir() and any(images_in(folder / name) for name in class_folders(folder))


def _images(folder: Path, input: Input | None) -> Dataset:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it should hold one sub-folder of images a class")
    if input is None:
        return ImageFolder.scan(folder)
    channels, height, width = input.image_shape
    return ImageFolder.scan(folder, channels=channels, size=(height, width))
