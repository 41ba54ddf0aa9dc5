"""A data set's two parts: what devices share among them, and what the server measures with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_sdk.data import ArrayDataset
from edge_sdk.errors import DataError
from edge_sdk.tensors import Array


@dataclass(frozen=True)
class TrainTest:
    """A data set in memory.

    ``train`` is what devices share among them, ``test`` is the server's to measure with. ``people`` says
    whom each training example is from, int64 ``[N]``, where that is known.
    """

    name: str
    train: ArrayDataset
    test: ArrayDataset
    classes: int
    class_names: tuple[str, ...]
    people: Array | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of one image, (channels, height, width)."""
        height, width, *channels = self.train.images.shape[1:]
        return (channels[0] if channels else 1, height, width)


def held_out(whole: ArrayDataset, count: int, seed: int, path: Path) -> tuple[ArrayDataset, ArrayDataset]:
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
