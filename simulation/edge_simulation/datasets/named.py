"""The public data sets that go by a name."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_sdk.data import ArrayDataset
from edge_sdk.data.cifar import find_cifar, load_cifar
from edge_sdk.data.idx import find_idx, load_idx
from edge_sdk.errors import DataError
from edge_simulation.datasets.train_test import TrainTest, held_out

DIGITS_TEST = 360
_FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_FASHION_CLASSES = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer",
    "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


def digits(seed: int) -> TrainTest:
    """1,797 digits of 8×8, of which ``seed`` draws the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("digits come with scikit-learn: pip install 'edge-sdk-fl[simulation]'") from None
    loaded = load_digits()
    # 17 grey levels, 0 to 16, spread over a byte.
    images = np.round(loaded.images * (255 / 16)).astype(np.uint8)
    whole = ArrayDataset(images, loaded.target.astype(np.int64))
    train, test = held_out(whole, DIGITS_TEST, seed, Path("digits"))
    return TrainTest("digits", train, test, 10, tuple(str(digit) for digit in range(10)))


def fashion_mnist(folder: Path | None) -> TrainTest:
    """Fashion-MNIST below ``folder``, or where Debian's package puts it."""
    places = [_FASHION_FOLDER] if folder is None else [folder, folder / "fashion-mnist"]
    found = next((place for place in places if find_idx(place, "train")), None)
    if found is None:
        raise DataError(
            f"{places[0]}: no Fashion-MNIST: apt-get install dataset-fashion-mnist (Debian, non-free), or "
            "give --data-dir the folder with train-images-idx3-ubyte.gz and its three companions"
        )
    return TrainTest("fashion-mnist", load_idx(found, "train"), load_idx(found, "test"), 10, _FASHION_CLASSES)


def cifar(folder: Path | None, classes: int) -> TrainTest:
    """CIFAR-10 or CIFAR-100 below ``folder``, in the binary version."""
    unpacked = "cifar-10-batches-bin" if classes == 10 else "cifar-100-binary"
    for place in [] if folder is None else [folder, folder / unpacked]:
        found = find_cifar(place, "train")
        if found is not None and found[1] == classes:
            names = _CIFAR10_CLASSES if classes == 10 else _fine_names(place)
            return TrainTest(
                f"cifar{classes}", load_cifar(place, "train"), load_cifar(place, "test"), classes, names
            )
    raise DataError(
        f"{folder or f'cifar{classes}'}: no CIFAR-{classes}: give --data-dir the folder that holds "
        f"{'data_batch_1.bin …' if classes == 10 else 'train.bin and test.bin'} "
        f"(unpack cifar-{classes}-binary.tar.gz from cs.toronto.edu/~kriz/cifar.html)"
    )


def _fine_names(folder: Path) -> tuple[str, ...]:
    path = folder / "fine_label_names.txt"
    names = path.read_text("utf-8", "replace").split() if path.is_file() else []
    return tuple(names) if len(names) == 100 else tuple(str(label) for label in range(100))
