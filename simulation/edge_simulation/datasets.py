"""The data sets of the demo and the benchmarks, each with its training and its test part."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_sdk.data import ArrayDataset, Dataset
from edge_sdk.data.cifar import find_cifar, load_cifar
from edge_sdk.data.folder import ImageFolder, class_folders
from edge_sdk.data.idx import find_idx, load_idx
from edge_sdk.data.load import has_class_folders
from edge_sdk.data.npz import load_npz
from edge_sdk.errors import DataError
from edge_sdk.tensors import Array

DIGITS_TEST = 360
TEST_FRACTION = 0.2
MAX_SIDE = 32
NAMES = ("digits", "fashion-mnist", "cifar10")
_FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_FASHION_CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer",
    "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


@dataclass(frozen=True)
class TrainTest:
    """A data set in memory.

    ``train`` is what devices share among them, ``test`` is the server's to measure with.
    """

    name: str
    train: ArrayDataset
    test: ArrayDataset
    classes: int
    class_names: tuple[str, ...]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of one image, (channels, height, width)."""
        height, width, *channels = self.train.images.shape[1:]
        return (channels[0] if channels else 1, height, width)


def load_train_test(
    name_or_path: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None, seed: int = 0
) -> TrainTest:
    """Load a data set by name, or one's own from a path.

    A part that is missing is held out of the other: 20 % of each class, by ``seed``.

    Args:
        name_or_path: ``digits`` (1,797 images of 8×8 that come with scikit-learn, 360 of them for the
            test), ``fashion-mnist`` (28×28, arXiv 1708.07747), ``cifar10``, or the path of a folder in the
            layout of MNIST or CIFAR, of a ``.npz`` with ``images`` and ``labels``, or of a folder of images
            with one sub-folder a class (below ``train/`` and ``test/`` where there are both).
        data_dir: where the files of ``fashion-mnist`` or ``cifar10`` are.
        seed: draws the held-out images; not negative.

    Raises:
        DataError: an unknown name, files that are missing or damaged, or too few images to hold any out.
    """
    name = os.fspath(name_or_path)
    if name == "digits":
        return _digits(seed)
    if name == "fashion-mnist":
        return _fashion_mnist(None if data_dir is None else Path(data_dir))
    if name == "cifar10":
        return _cifar10(None if data_dir is None else Path(data_dir))
    path = Path(name)
    if not path.exists():
        raise DataError(f"no data set or path {name!r}: use {', '.join(NAMES)} or the path of your own")
    return _from_path(path, seed)


def _digits(seed: int) -> TrainTest:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("digits come with scikit-learn: pip install 'edge-sdk-fl[simulation]'") from None
    digits = load_digits()
    # 17 grey levels, 0 to 16, spread over a byte.
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)
    whole = ArrayDataset(images, digits.target.astype(np.int64))
    train, test = _held_out(whole, DIGITS_TEST, seed, Path("digits"))
    return TrainTest("digits", train, test, 10, tuple(str(digit) for digit in range(10)))


def _fashion_mnist(folder: Path | None) -> TrainTest:
    places = [_FASHION_FOLDER] if folder is None else [folder, folder / "fashion-mnist"]
    found = next((place for place in places if find_idx(place, "train")), None)
    if found is None:
        raise DataError(
            f"{places[0]}: no Fashion-MNIST: apt-get install dataset-fashion-mnist (Debian, non-free), or "
            "give --data-dir the folder with train-images-idx3-ubyte.gz and its three companions"
        )
    return TrainTest("fashion-mnist", load_idx(found, "train"), load_idx(found, "test"), 10, _FASHION_CLASSES)


def _cifar10(folder: Path | None) -> TrainTest:
    places = [] if folder is None else [folder, folder / "cifar-10-batches-bin"]
    found = next((place for place in places if find_cifar(place, "train")), None)
    if found is None:
        raise DataError(
            f"{folder or 'cifar10'}: no CIFAR-10: give --data-dir the folder that holds data_batch_1.bin … "
            "(unpack cifar-10-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html)"
        )
    return TrainTest("cifar10", load_cifar(found, "train"), load_cifar(found, "test"), 10, _CIFAR10_CLASSES)


def _from_path(path: Path, seed: int) -> TrainTest:
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
    return _held_out(whole, round(len(whole) * TEST_FRACTION), seed, path)


def _held_out(whole: ArrayDataset, count: int, seed: int, path: Path) -> tuple[ArrayDataset, ArrayDataset]:
    """Hold out ``count`` examples, from each class in proportion: largest remainders get the rest."""
    if not 0 < count < len(whole):
        raise DataError(f"{path}: {len(whole)} images are too few to hold some out for a test")
    classes, sizes = np.unique(whole.labels, return_counts=True)
    quotas = sizes * count / len(whole)
    takes = np.floor(quotas).astype(np.int64)
    takes[np.argsort(takes - quotas, kind="stable")[: count - takes.sum()]] += 1
    generator = np.random.default_rng(seed)
    test: Array = np.sort(
        np.concatenate(
            [
                generator.permutation(np.flatnonzero(whole.labels == label))[:take]
                for label, take in zip(classes, takes, strict=True)
            ]
        )
    )
    return whole.take(np.setdiff1d(np.arange(len(whole)), test)), whole.take(test)
