"""Many devices in one process, one runtime for all of them: what each does with its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from edge_sdk.augment import Augmented, augmented
from edge_sdk.bundle import Bundle
from edge_sdk.codec import pack, quantise, unpack
from edge_sdk.data import ArrayDataset, Dataset
from edge_sdk.data.labels import histogram, labels_of
from edge_sdk.errors import DataError
from edge_sdk.features import open_describer
from edge_sdk.runtime import Runtime, open_runtime
from edge_sdk.statistics import class_statistics
from edge_sdk.tensors import Array, Tensors, encode
from edge_sdk.training import LocalTraining, train
from edge_sdk.update import check_update, difference
from edge_sdk.work import SAFETENSORS_OVERHEAD
from edge_server.aggregation import bound_norm
from edge_server.config import RunConfig
from edge_server.selection import device_seed

Share: TypeAlias = Dataset | tuple[Dataset, Array]
"""A device's data: a data set, or one that devices share and this one's indices into it."""


@dataclass(slots=True, kw_only=True)
class Devices:
    """The devices of a simulation by id, ascending. What they keep between rounds is in memory.

    Args:
        bundle: what they train.
        config: the run's settings.
        shares: each device's data.
        threads: of the runtime that all of them use, one after the other.
        withhold_below: a class with fewer examples is told to the server as if there were none.

    Raises:
        DataError: there is no device, or one has no data.
    """

    bundle: Bundle
    config: RunConfig
    shares: Mapping[str, Share]
    threads: int = 1
    withhold_below: int = 0
    runtime: Runtime = field(init=False)
    steps: int = field(default=0, init=False)
    """Local steps that all devices have done."""
    bytes_sent: int = field(default=0, init=False)
    """Of their updates."""
    _own: dict[str, tuple[Dataset, Array]] = field(default_factory=dict, init=False)
    _training: dict[str, tuple[Dataset, Array]] = field(default_factory=dict, init=False)
    _velocity: dict[str, Tensors] = field(default_factory=dict, init=False)
    _plain_bytes: int = field(init=False)
    _residual: dict[str, Tensors] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not self.shares:
            raise DataError("a simulation without a device: give at least one")
        for device, share in sorted(self.shares.items()):
            dataset, indices = share if isinstance(share, tuple) else (share, np.arange(len(share)))
            if len(indices) == 0:
                raise DataError(f"device {device} has no example: give it one, or leave it out")
            self._own[device] = (dataset, indices)
        self._training = dict(self._own)
        self.runtime = open_runtime(self.bundle, threads=self.threads)
        self._plain_bytes = len(encode(self.bundle.weights))

    @property
    def ids(self) -> list[str]:
        """All devices."""
        return list(self._own)

    @property
    def sizes(self) -> dict[str, int]:
        """How many examples each device trains on."""
        return {device: len(indices) for device, (_, indices) in self._training.items()}

    def augment(self, multiples: Mapping[int, float]) -> None:
        """Train on more examples of the classes in ``multiples`` from now on."""
        for device, (dataset, indices) in self._own.items():
            grown, chosen = augmented(
                dataset,
                indices,
                multiples=multiples,
                classes=self.bundle.manifest.classes,
                seed=device_seed(self.config.seed, 0, device),
                stored=self.config.augmentation_stored,
            )
            self._training[device] = _gathered(grown, chosen)

    def histograms(self) -> dict[str, Array]:
        """Labels of each device's training data, int64 ``[classes]``, as it is now."""
        classes = self.bundle.manifest.classes

        def counts(data: tuple[Dataset, Array], withhold_below: int = 0) -> Array:
            return histogram(labels_of(*data, classes), classes, withhold_below=withhold_below)

        # Copies do not lift a class over the bound below which it is withheld.
        return {
            device: np.where(counts(own, self.withhold_below) > 0, counts(self._training[device]), 0)
            for device, own in self._own.items()
        }

    def descriptors(self) -> dict[str, Array]:
        """The hash, or with ``descriptor`` ``feature`` the mean feature, of each device's data."""
        describer = open_describer(self.bundle, threads=self.threads)
        describe = describer.descriptor if self.config.descriptor == "hash" else describer.mean_feature
        return {device: describe(*data) for device, data in self._own.items()}

    def train(
        self, device: str, weights: Tensors, *, round_number: int, hop: int, bounds: Mapping[str, int]
    ) -> tuple[Tensors, int]:
        """Train ``device`` from ``weights``; returns its Δ and the examples that it trained on.

        Raises:
            TensorError: an update that is not finite or beyond its bound: the device has diverged.
        """
        config, manifest = self.config, self.bundle.manifest
        dataset, indices = self._training[device]
        self.runtime.set_weights(weights)
        if device in self._velocity:
            self.runtime.set_velocity(self._velocity[device])
        settings = LocalTraining(
            epochs=config.epochs,
            batch_size=config.batch_size,
            optimiser=config.optimiser_of(round_number),
            seed=device_seed(config.seed, round_number, device, hop=hop),
        )
        train(self.runtime, manifest, dataset, indices, settings)
        self.steps += config.epochs * -(-len(indices) // config.batch_size)
        if config.keep_momentum:
            self._velocity[device] = self.runtime.get_velocity()
        update = difference(weights, self.runtime.get_weights())
        check_update(update, manifest.rules, bounds)
        sent = self._sent(device, update, settings.seed)
        return bound_norm(sent, manifest.rules, largest=config.max_norm, over=config.over_norm), len(indices)

    def _sent(self, device: str, update: Tensors, seed: int) -> Tensors:
        """The update as the server gets it; what its codec loses is kept for the device's next one."""
        config, parameters = self.config, self.bundle.manifest.parameters
        if (config.codec, config.compression) == ("fp32", "none"):
            self.bytes_sent += self._plain_bytes
            return update
        sent, self._residual[device] = quantise(
            update, parameters, config.codec, seed=seed, residual=self._residual.get(device)
        )
        data = pack(sent, config.compression)
        self.bytes_sent += len(data)
        limit = self.bundle.manifest.nbytes + SAFETENSORS_OVERHEAD
        return unpack(data, parameters, config.codec, config.compression, limit=limit)

    def statistics(self, weights: Tensors) -> list[Tensors]:
        """Statistics of every device's features with ``weights``, of its own examples alone."""
        self.runtime.set_weights(weights)
        return [
            class_statistics(
                self.runtime,
                self.bundle.manifest,
                *data,
                covariance=self.config.covariance,
                rank=self.config.covariance_rank,
                withhold_below=self.withhold_below,
            )
            for data in self._own.values()
        ]


def _gathered(dataset: Dataset, indices: Array) -> tuple[Dataset, Array]:
    """The same examples in one array where that is possible: batches of it are taken in one go."""
    if not isinstance(dataset, Augmented) or dataset.images is None:
        return dataset, indices
    if not isinstance(dataset.dataset, ArrayDataset):
        return dataset, indices
    own = dataset.dataset.take(indices[indices < dataset.originals])
    images = np.concatenate([own.images, np.stack(dataset.images)])
    return ArrayDataset(images, np.concatenate([own.labels, dataset.labels])), np.arange(len(images))
