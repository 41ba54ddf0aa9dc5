"""Local training and evaluation of one device on its own data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edge_sdk.data import Dataset, batches
from edge_sdk.errors import DataError
from edge_sdk.examples import Cancelled, Examples, in_order
from edge_sdk.manifest import Manifest
from edge_sdk.runtime import Optimiser, Runtime, Sums
from edge_sdk.tensors import Array


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
    first: int = 0,
    on_epoch: Callable[[int], None] | None = None,
    on_progress: OnProgress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Sums:
    """Train the runtime's weights in place on ``dataset[indices]``; returns sums over the epochs done here.

    Where the bundle has a backbone its features are computed first, once for all epochs.

    Args:
        first: epochs that are done, and are left out.
        on_epoch: called with the epochs done in all after each one but the last.

    Raises:
        DataError: there is nothing to train on, or an example does not fit the model.
        BundleError: the backbone's features are not those that the manifest declares.
        Cancelled: ``cancelled()`` became true; the runtime's weights are of no use then.
    """
    count = len(indices)
    if count == 0:
        raise DataError("the data set holds no example to train on")
    each = -(-count // settings.batch_size)
    # Of one round, whatever its first epoch: features are the same when training goes on half-way.
    round_rng = np.random.default_rng([settings.seed, 0, 3])
    examples = Examples(runtime, manifest, dataset, indices, rng=round_rng, cancelled=cancelled)
    totals = Sums(0.0, 0, 0)
    for epoch in range(first, settings.epochs):
        # Shuffles have [seed, epoch]: no other stream of numbers may begin like that.
        crop_rng = np.random.default_rng([settings.seed, epoch, 1])
        noise_rng = np.random.default_rng([settings.seed, epoch, 2])
        shuffled = batches(count, batch_size=settings.batch_size, seed=settings.seed, first=epoch, epochs=1)
        for step, batch in enumerate(shuffled, start=epoch * each + 1):
            if cancelled():
                raise Cancelled
            x, y = examples.take(batch, crop_rng)
            noise = [noise_rng.random((len(y), *n.shape), np.float32) for n in manifest.noise]
            totals += runtime.train_step(x, y, np.ones(len(y), np.float32), settings.optimiser, noise)
            if on_progress is not None:
                on_progress(Progress(step, each * settings.epochs, totals.loss / totals.examples))
        if on_epoch is not None and epoch + 1 < settings.epochs:
            on_epoch(epoch + 1)
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
        BundleError: as :func:`train` does.
        Cancelled: ``cancelled()`` became true between two batches.
    """
    totals = Sums(0.0, 0, 0)
    for x, y in in_order(runtime, manifest, dataset, indices, cancelled=cancelled):
        totals += runtime.evaluate(x, y)
    return totals
