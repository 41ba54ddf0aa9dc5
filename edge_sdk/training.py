"""Local training and evaluation of one device on its own data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edge_sdk.data import Dataset, batches, prepare
from edge_sdk.errors import DataError
from edge_sdk.manifest import Manifest
from edge_sdk.runtime import Optimiser, Runtime, Sums
from edge_sdk.tensors import Array

EVALUATION_BATCH = 256


class Cancelled(Exception):  # noqa: N818 - a request, not an error
    """Training or evaluation was asked to stop between two steps."""


@dataclass(frozen=True, slots=True)
class LocalTraining:
    """How a device trains in one round: SGD over shuffled batches.

    Args:
        epochs: passes over the device's data.
        batch_size: examples in a step; the last batch of an epoch may be smaller.
        optimiser: of each step.
        seed: of the shuffles, crops, flips and dropout noise; the same seed gives the same update.
    """

    epochs: int
    batch_size: int
    optimiser: Optimiser
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far local training has come: steps done, steps in all, mean loss so far."""

    step: int
    steps: int
    loss: float


OnProgress: TypeAlias = Callable[[Progress], None]


def train(
    runtime: Runtime,
    manifest: Manifest,
    dataset: Dataset,
    indices: Array,
    settings: LocalTraining,
    *,
    on_progress: OnProgress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Sums:
    """Train the runtime's weights in place on ``dataset[indices]``; returns sums over all epochs.

    Raises:
        DataError: there is nothing to train on, or an example does not fit the model.
        Cancelled: ``cancelled()`` became true; the runtime's weights are of no use then.
    """
    count = len(indices)
    if count == 0:
        raise DataError("the data set holds no example to train on")
    noise_rng = np.random.default_rng([settings.seed, 1])
    # No epoch's shuffle, which [seed, epoch] seeds, begins like this.
    crop_rng = np.random.default_rng([settings.seed, 0, 1])
    steps = settings.epochs * -(-count // settings.batch_size)
    totals = Sums(0.0, 0, 0)
    plan = batches(count, batch_size=settings.batch_size, epochs=settings.epochs, seed=settings.seed)
    for step, batch in enumerate(plan, start=1):
        if cancelled():
            raise Cancelled
        x, y = prepare(dataset, indices[batch], manifest.input, manifest.classes, rng=crop_rng)
        noise = [noise_rng.random((len(y), *n.shape), np.float32) for n in manifest.noise]
        totals += runtime.train_step(x, y, np.ones(len(y), np.float32), settings.optimiser, noise)
        if on_progress is not None:
            on_progress(Progress(step, steps, totals.loss / totals.examples))
    return totals


def evaluate(
    runtime: Runtime,
    manifest: Manifest,
    dataset: Dataset,
    indices: Array,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> Sums:
    """Loss and correct predictions of the runtime's weights on ``dataset[indices]``, as sums.

    Raises:
        DataError: an example does not fit the model.
        Cancelled: ``cancelled()`` became true between two batches.
    """
    totals = Sums(0.0, 0, 0)
    for start in range(0, len(indices), EVALUATION_BATCH):
        if cancelled():
            raise Cancelled
        batch = indices[start : start + EVALUATION_BATCH]
        totals += runtime.evaluate(*prepare(dataset, batch, manifest.input, manifest.classes))
    return totals
