"""One call for the data sets that have a name and for one's own."""

from __future__ import annotations

import os
from pathlib import Path

from edge_sdk.errors import DataError
from edge_simulation.datasets.named import cifar, digits, fashion_mnist
from edge_simulation.datasets.own import from_path
from edge_simulation.datasets.smartwatch import smartwatch
from edge_simulation.datasets.train_test import TrainTest

NAMES = ("digits", "fashion-mnist", "cifar10", "cifar100", "smartwatch")


def load_train_test(
    name_or_path: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None, seed: int = 0
) -> TrainTest:
    """Load a data set by name, or one's own from a path.

    A part that is missing is held out of the other: 20 % of each class, by ``seed``.

    Args:
        name_or_path: ``digits`` (1,797 images of 8×8 that come with scikit-learn, 360 of them for the
            test), ``fashion-mnist`` (28×28, arXiv 1708.07747), ``cifar10``, ``cifar100`` (its 100 fine
            classes), ``smartwatch`` (ten people's exercises, see
            :func:`edge_simulation.datasets.smartwatch.smartwatch`), or the path of a folder in the layout
            of MNIST or CIFAR, of a ``.npz`` with ``images`` and ``labels``, or of a folder of images with
            one sub-folder a class (below ``train/`` and ``test/`` where there are both).
        data_dir: where the files of ``fashion-mnist``, ``cifar10`` or ``cifar100`` are.
        seed: draws the held-out images; not negative.

    Raises:
        DataError: an unknown name, files that are missing or damaged, or too few images to hold any out.
    """
    name = os.fspath(name_or_path)
    folder = None if data_dir is None else Path(data_dir)
    if name == "digits":
        return digits(seed)
    if name == "fashion-mnist":
        return fashion_mnist(folder)
    if name in ("cifar10", "cifar100"):
        return cifar(folder, int(name.removeprefix("cifar")))
    if name == "smartwatch":
        return smartwatch()
    path = Path(name)
    if not path.exists():
        raise DataError(f"no data set or path {name!r}: use {', '.join(NAMES)} or the path of your own")
    return from_path(path, seed)
