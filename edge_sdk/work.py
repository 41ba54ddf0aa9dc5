"""One task of a round on a device: fetch the model, train or evaluate, hand in the result."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from edge_sdk import codec, training, update
from edge_sdk.augment import augmented
from edge_sdk.bundle import MAX_BYTES, Bundle
from edge_sdk.data import Dataset, as_dataset, split_held_out
from edge_sdk.description import Sharing, describe, refuse_unshared
from edge_sdk.errors import BundleError, DataError, ProtocolError, RuntimeUnavailableError, TensorError
from edge_sdk.exchange import Exchange
from edge_sdk.features import Describer, open_describer
from edge_sdk.halfway import Checkpoints
from edge_sdk.link import Link
from edge_sdk.manifest import MAX_CLASSES, Manifest
from edge_sdk.protocol import reference
from edge_sdk.protocol.messages import Offer, Receipt, Ref, Report, Taken, Task, key_of, number, to_number
from edge_sdk.runtime import Optimiser, Runtime, open_runtime
from edge_sdk.statistics import class_statistics
from edge_sdk.tensors import Array, Tensors, decode, encode
from edge_sdk.workspace import Newest, Workspace

logger = logging.getLogger(__name__)

SAFETENSORS_OVERHEAD = 1 << 20
"""Bytes that a safetensors header may add to a model's own."""

Cancellation: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Which runtime a device uses and how; see :func:`edge_sdk.runtime.open_runtime`."""

    runtime: str = "onnx"
    threads: int = 0
    providers: Sequence[str] | None = None

    def open(self, bundle: Bundle) -> Runtime:
        """Open ``bundle`` in this runtime."""
        return open_runtime(bundle, self.runtime, threads=self.threads, providers=self.providers)

    def open_describer(self, bundle: Bundle) -> Describer:
        """Open the frozen network by which ``bundle`` describes data."""
        return open_describer(bundle, self.runtime, threads=self.threads, providers=self.providers)


@dataclass(slots=True, kw_only=True)
class Worker:
    """Does the tasks of one device, one at a time; called by a thread that is not the network's.

    Args:
        source: the device's data, looked at anew for every task.
        held_out: the share of the data that is evaluated on and never trained on.
        sharing: what may leave the device besides updates.
        on_model: called when a model has arrived that the device did not have.
    """

    workspace: Workspace
    engine: Engine
    source: object
    held_out: float
    sharing: Sharing = field(default_factory=Sharing)
    on_progress: training.OnProgress | None = None
    on_model: Callable[[], None] | None = None
    examples: int = field(default=0, init=False)
    """Examples to train on when the data was last looked at."""
    _augmented: tuple[object, tuple[Dataset, Array]] | None = field(default=None, init=False)
    _opened: tuple[str, Bundle, Runtime] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._look()

    def adopt(self, bundle: Bundle) -> None:
        """Open ``bundle`` unless it is the open one."""
        if self._opened is None or self._opened[0] != bundle.sha256:
            self.workspace.keep(bundle.data)
            self.workspace.open_bundle = bundle.sha256
            self._opened = (bundle.sha256, bundle, self.engine.open(bundle))

    def open(self, bundle: Ref, exchange: Exchange, cancelled: Cancellation) -> tuple[Bundle, Runtime]:
        """Open the run's bundle, fetching it if it is not here; BundleError if it is none."""
        if self._opened is None or self._opened[0] != bundle.hash:
            if self._opened is not None:
                logger.warning(
                    "this device's bundle %s is not the run's %s: taking the run's",
                    self._opened[0][:12],
                    bundle.hash[:12],
                )
            self.adopt(Bundle.read(self._fetch(bundle, MAX_BYTES, exchange, cancelled)))
        assert self._opened is not None
        return self._opened[1:]

    def load(
        self, bundle: Ref, model: Ref, exchange: Exchange, cancelled: Cancellation, *, lent: bool = False
    ) -> Tensors:
        """Open the run's bundle and set the model's weights, fetching what is not here; returns the weights.

        Args:
            lent: the model is on its way along a chain of devices, and is not one to predict with.

        Raises:
            BundleError: what the run calls its bundle is none.
            TensorError: the model is not one of this bundle.
        """
        opened, runtime = self.open(bundle, exchange, cancelled)
        limit = opened.manifest.nbytes + SAFETENSORS_OVERHEAD
        weights = decode(self._fetch(model, limit, exchange, cancelled), opened.manifest.specs)
        runtime.set_weights(weights)
        newest = Newest(bundle.hash, model.hash)
        if not lent and newest != self.workspace.newest:
            self.workspace.set_newest(newest)
            if self.on_model is not None:
                self.on_model()
        return weights

    def perform(self, task: Task, link: Link, exchange: Exchange, cancelled: Cancellation) -> Receipt | None:
        """Do ``task`` to its end. A finished update of the same task is handed in without training again.

        Returns:
            The receipt of an update; None after any other task, whose result is the end of it.

        Raises:
            EdgeError: the task cannot be done; the caller declines it with the reason.
            Cancelled: the server wants it no longer, or the client stops.
        """
        pending = self.workspace.pending
        if pending is not None and pending.key == task.key:
            data = self.workspace.blob(pending.blob.hash)
            if data is not None:
                link.send(Taken(**key_of(task), examples=pending.examples))
                return self.hand_in(pending, data, exchange, cancelled, timeout=task.deadline)
        refuse_unshared(task, self.sharing)
        if task.kind == "train":
            _check_compression(task)
        data_set = self._data_for(task)
        link.send(Taken(**key_of(task), examples=len(data_set[1])))
        if task.kind == "train" and pending is not None and pending.run == task.run:
            # Whether the one before counts decides what this one goes on from.
            self.settle(pending, exchange, cancelled, timeout=task.deadline)
        bundle, runtime = self.open(task.bundle, exchange, cancelled)
        if task.kind == "describe":
            told = self._describe(task, bundle, *data_set, cancelled)
            self._tell(task, told, len(data_set[1]), exchange, cancelled)
            return None
        received = self.load(task.bundle, task.model, exchange, cancelled, lent=task.hop > 0)
        if task.kind == "statistics":
            told = class_statistics(
                runtime,
                bundle.manifest,
                *data_set,
                covariance=task.covariance,
                rank=task.rank,
                withhold_below=self.sharing.withhold_below,
                noise=self.sharing.feature_noise(),
                cancelled=cancelled,
            )
            self._tell(task, told, len(data_set[1]), exchange, cancelled)
            return None
        if task.kind == "evaluate":
            sums = training.evaluate(runtime, bundle.manifest, *data_set, cancelled=cancelled)
            loss = _finite(sums.loss)
            report = Report(**key_of(task), loss=loss, correct=sums.correct, examples=sums.examples)
            exchange.deliver(report, b"", timeout=task.deadline, cancelled=cancelled)
            return None
        delta = self._train(task, bundle.manifest, runtime, received, *data_set, cancelled)
        data, residual = self._pack(task, bundle.manifest, delta)
        velocity = encode(runtime.get_velocity()) if task.keep_momentum else None
        offer = Offer(**key_of(task), blob=reference(data, chunk=task.model.chunk), examples=len(data_set[1]))
        self.workspace.set_pending(offer, data, residual=residual, velocity=velocity)
        return self.hand_in(offer, data, exchange, cancelled, timeout=task.deadline)

    def _pack(self, task: Task, manifest: Manifest, delta: Tensors) -> tuple[bytes, bytes | None]:
        """The update as it travels, and what that loses, which the next update is to make up for."""
        lost = self.workspace.residual(task) if task.codec != "fp32" else None
        sent, residual = codec.quantise(
            delta,
            manifest.parameters,
            task.codec,
            seed=task.seed,
            residual=decode(lost, manifest.trainable) if lost is not None else None,
        )
        # What was lost before, and rounding, may have brought it over a bound that it kept.
        update.check_update(codec.restored(sent, manifest.parameters), manifest.rules, task.bounds)
        return codec.pack(sent, task.compression), encode(residual) if residual else None

    def _tell(
        self, task: Task, told: Tensors, examples: int, exchange: Exchange, cancelled: Cancellation
    ) -> None:
        """Deliver what is made anew in seconds, and so is not kept over restarts."""
        data = encode(told)
        offer = Offer(**key_of(task), blob=reference(data, chunk=task.model.chunk), examples=examples)
        exchange.deliver(offer, data, timeout=task.deadline, cancelled=cancelled)

    def _train(
        self,
        task: Task,
        manifest: Manifest,
        runtime: Runtime,
        received: Tensors,
        dataset: Dataset,
        indices: Array,
        cancelled: Cancellation,
    ) -> Tensors:
        """The update that training on ``dataset[indices]`` makes."""
        if not set(manifest.rules.values()) <= task.bounds.keys():
            raise ProtocolError("the task gives no bound for a rule of aggregation that the bundle has")
        if task.keep_momentum:
            velocity = self.workspace.velocity(task)
            if velocity is not None:
                runtime.set_velocity(decode(velocity, manifest.trainable))
        checkpoints = Checkpoints(self.workspace, task, len(indices), runtime)
        training.train(
            runtime,
            manifest,
            dataset,
            indices,
            settings_of(task),
            first=checkpoints.resume(manifest),
            on_epoch=checkpoints.keep,
            on_progress=self.on_progress,
            cancelled=cancelled,
        )
        delta = update.difference(received, runtime.get_weights())
        update.check_update(delta, manifest.rules, task.bounds)
        return delta

    def _describe(
        self, task: Task, bundle: Bundle, dataset: Dataset, indices: Array, cancelled: Cancellation
    ) -> Tensors:
        """What the task wants to know of ``dataset[indices]``, and the app lets it know."""
        try:
            return describe(
                dataset,
                indices,
                bundle.manifest,
                task.wants,
                self.sharing,
                trained=lambda: self._augment(task, dataset, indices),
                multiples=_multiples(task),
                open_describer=lambda: self.engine.open_describer(bundle),
                cancelled=cancelled,
            )
        except BundleError as error:
            # It can train all the same.
            raise ProtocolError(f"the data cannot be described: {error}") from None

    def _data_for(self, task: Task) -> tuple[Dataset, Array]:
        """The examples that the task is about."""
        dataset, trained_on, held_out = self._look()
        if task.kind == "evaluate":
            return dataset, held_out
        return (dataset, trained_on) if task.kind != "train" else self._augment(task, dataset, trained_on)

    def _augment(self, task: Task, dataset: Dataset, trained_on: Array) -> tuple[Dataset, Array]:
        """The examples with their copies, which are made once for a plan."""
        wanted = task.augmentation
        if wanted is None:
            return dataset, trained_on
        made_of = (wanted, len(dataset))
        if self._augmented is None or self._augmented[0] != made_of:
            try:
                data_set = augmented(
                    dataset,
                    trained_on,
                    multiples=_multiples(task),
                    classes=MAX_CLASSES,
                    seed=wanted.seed,
                    stored=wanted.stored,
                )
            except DataError as error:
                # Another plan may do: this one is no reason for the device to end.
                raise ProtocolError(f"the data cannot be augmented as the task wants: {error}") from None
            self._augmented = (made_of, data_set)
        return self._augmented[1]

    def settle(
        self, offer: Offer, exchange: Exchange, cancelled: Cancellation, *, timeout: float
    ) -> Receipt | None:
        """Hand in an update that was kept; None if it is not here any more, or damaged."""
        data = self.workspace.blob(offer.blob.hash)
        if data is None:
            self.workspace.clear_pending(accepted=False)
            return None
        return self.hand_in(offer, data, exchange, cancelled, timeout=timeout)

    def hand_in(
        self, offer: Offer, data: bytes, exchange: Exchange, cancelled: Cancellation, *, timeout: float
    ) -> Receipt:
        """Deliver a finished update; it stays on disk until its receipt.

        Raises:
            BrokerError: the server has not answered for ``timeout`` seconds.
        """
        receipt = exchange.deliver(offer, data, timeout=timeout, cancelled=cancelled)
        self.workspace.clear_pending(accepted=receipt.accepted)
        return receipt

    def _look(self) -> tuple[Dataset, Array, Array]:
        """The data as it is now, and the indices to train and to evaluate on; DataError if it is empty."""
        dataset = as_dataset(self.source)
        if len(dataset) == 0:
            raise DataError("the data set is empty: give the device at least one labelled image")
        trained_on, held_out = split_held_out(len(dataset), self.held_out, 0)
        self.examples = len(trained_on)
        return dataset, trained_on, held_out

    def _fetch(self, ref: Ref, limit: int, exchange: Exchange, cancelled: Cancellation) -> bytes:
        data = self.workspace.blob(ref.hash)
        if data is None:
            partial = self.workspace.partial(ref)
            with contextlib.closing(partial) if partial is not None else contextlib.nullcontext():
                data = exchange.fetch(ref, limit=limit, cancelled=cancelled, storage=partial)
            self.workspace.keep(data)
        return data


def _multiples(task: Task) -> dict[int, float]:
    """By class, to how many times its examples the task augments it."""
    plan = task.augmentation.multiples if task.augmentation is not None else {}
    return {int(label): number(text) for label, text in plan.items()}


def _check_compression(task: Task) -> None:
    """Raise ProtocolError, before the training, if its result could not be sent."""
    try:
        codec.check_available(task.compression)
    except RuntimeUnavailableError as error:
        # Another run may want none: this one is no reason for the device to end.
        raise ProtocolError(f"the update cannot be compressed as the task wants: {error}") from None


def _finite(loss: float) -> str:
    try:
        return to_number(loss)
    except ValueError:
        raise TensorError("the model's loss on this device's data is not finite: it has diverged") from None


def settings_of(task: Task) -> training.LocalTraining:
    """How ``task`` wants a device to train; ProtocolError for a number out of float64's range."""
    return training.LocalTraining(
        epochs=task.epochs,
        batch_size=task.batch_size,
        optimiser=Optimiser(
            lr=number(task.lr),
            weight_decay=number(task.weight_decay),
            momentum=number(task.momentum),
            proximal=number(task.proximal),
            clip_norm=number(task.clip_norm),
        ),
        seed=task.seed,
    )
