"""The device client to embed in an app: it joins a fleet, trains when asked, and predicts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.data import as_dataset
from edge_sdk.description import Sharing
from edge_sdk.errors import DataError, RunError
from edge_sdk.examples import enter
from edge_sdk.link import Link
from edge_sdk.protocol import Topics
from edge_sdk.runtime import Runtime, check_runtime
from edge_sdk.session import Session
from edge_sdk.tensors import Array, decode
from edge_sdk.training import OnProgress
from edge_sdk.transport import Credentials, MqttTransport, Transport
from edge_sdk.transport.mqtt import login_of
from edge_sdk.work import Engine, Worker
from edge_sdk.workspace import Newest, Workspace


@dataclass(frozen=True, slots=True)
class Visit:
    """How a check-in went.

    Attributes:
        accepted: this device's updates that the server has accepted.
        come_back: seconds after which another visit pays; None if the server did not say.
        finished: whether the run is over.
    """

    accepted: int
    come_back: int | None
    finished: bool


class EdgeClient:
    """A device of a fleet.

    Use it as the one object of the SDK in an app: give it the data, call :meth:`run` in a thread of your
    own (or :meth:`check_in` now and then), and :meth:`predict` whenever you like.

    Args:
        broker: URL of the MQTT broker, or a transport that is not connected yet.
        fleet: the fleet's name.
        data: anything indexable, or an iterable of (image, label); see :func:`edge_sdk.data.as_dataset`.
            It may grow between rounds. It never leaves the device.
        work_dir: a folder of this device's own, for its identity, models and unfinished work.
        device_id: the broker's login where it is not given, since a broker's ACL goes by that; without a
            login, made once and kept in ``work_dir``. With a client certificate give its common name.
        bundle: path of the run's bundle; fetched from the server where it is not given.
        engine: runtime, threads and execution providers.
        credentials: login and TLS files for the broker.
        held_out: share of the data, in [0, 1), that is never trained on, for evaluations on the device.
        sharing: what else than updates may leave the device if the run needs it; nothing by default.
        may_train: asked before a task is taken: battery, charging, network. False declines it.
        on_progress: called after every training step, in the training thread.
        on_model: called once for every new model that has arrived, in the training thread.
        join_timeout: seconds to wait for a server's welcome.

    Raises:
        DataError: the data set is empty or none.
        ProtocolError: the fleet's name or the device id is not allowed.
        RunError: the work folder is in use.
        BundleError, RuntimeUnavailableError: the bundle cannot be opened.
    """

    def __init__(
        self,
        broker: str | Transport,
        *,
        fleet: str,
        data: object,
        work_dir: str | os.PathLike[str],
        device_id: str | None = None,
        bundle: str | os.PathLike[str] | None = None,
        engine: Engine | None = None,
        credentials: Credentials | None = None,
        held_out: float = 0.0,
        sharing: Sharing | None = None,
        may_train: Callable[[], bool] | None = None,
        on_progress: OnProgress | None = None,
        on_model: Callable[[], None] | None = None,
        join_timeout: float = 120.0,
    ) -> None:
        self._topics = Topics(fleet)
        engine = engine or Engine()
        check_runtime(engine.runtime)
        self._broker, self._credentials = broker, credentials
        self._may_train = may_train or (lambda: True)
        self._join_timeout = join_timeout
        self._stop = threading.Event()
        self._predicting: tuple[Newest, Bundle, Runtime] | None = None
        self._predict_lock = threading.Lock()
        self._serving = threading.Lock()
        self._workspace = Workspace(work_dir)
        try:
            given = device_id if device_id is not None else _login(broker, credentials)
            self.device_id = self._workspace.device_id(given)
            self._worker = Worker(
                workspace=self._workspace,
                engine=engine,
                # An iterator can be drawn only once, so this is the time.
                source=as_dataset(data) if isinstance(data, Iterator) else data,
                held_out=held_out,
                sharing=sharing or Sharing(),
                on_progress=on_progress,
                on_model=on_model,
            )
            if bundle is not None:
                self._worker.adopt(Bundle.read(bundle))
        except BaseException:
            self._workspace.close()
            raise

    def run(self, *, rounds: int | None = None, connect_timeout: float = 10.0) -> int:
        """Take part until the run ends, :meth:`stop` is called, or ``rounds`` updates were accepted.

        Returns:
            How many of this device's updates were accepted.

        Raises:
            BrokerError: the broker cannot be reached or refuses us, or no server answers in time.
            RefusedError: the server refuses this device (its id is in use, say).
            DataError: an example does not fit the run's model.
        """
        return self._serve(None, rounds, connect_timeout).accepted

    def check_in(self, budget: float, *, connect_timeout: float = 10.0) -> Visit:
        """Connect, offer to train for ``budget`` seconds, do what is asked in that time, and leave.

        For devices that are not always connected. An update that is finished but not handed in when the
        time is over is handed in at the next visit of the same round. Errors as for :meth:`run`.
        """
        return self._serve(budget, None, connect_timeout)

    def stop(self) -> None:
        """End :meth:`run` or :meth:`check_in` soon, and every later one at once. From any thread."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and give the work folder back. The client is of no use afterwards."""
        self.stop()
        self._workspace.close()

    def __enter__(self) -> EdgeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def predict(self, images: object) -> Array:
        """Logits float32 [N, classes] of the newest model on this device; may be called while training.

        Args:
            images: N images as they are in the data set; they are scaled and normalised here.

        Raises:
            RunError: no model has arrived yet.
            DataError: an image does not fit the model.
        """
        with self._predict_lock:
            bundle, runtime = self._newest_model()
            if not isinstance(images, Iterable):
                raise DataError("predict() takes a sequence of images: put a single one into a list")
            examples = as_dataset([(image, 0) for image in images])
            x, _ = enter(runtime, bundle.manifest, examples, np.arange(len(examples)))
            return runtime.predict(x)

    def _newest_model(self) -> tuple[Bundle, Runtime]:
        newest = self._workspace.newest
        if newest is None:
            raise RunError("no model has arrived on this device yet: let run() take part in a round first")
        if self._predicting is None or self._predicting[0].bundle != newest.bundle:
            data = self._workspace.blob(newest.bundle)
            if data is None:
                raise RunError("the newest model's bundle is gone from the work folder: take part in a round")
            bundle = Bundle.read(data)
            # A runtime of its own: predicting must not disturb training.
            self._predicting = (Newest(newest.bundle, ""), bundle, self._worker.engine.open(bundle))
        opened, bundle, runtime = self._predicting
        if opened.model != newest.model:
            weights = self._workspace.blob(newest.model)
            if weights is None:
                raise RunError("the newest model is gone from the work folder: take part in a round")
            runtime.set_weights(decode(weights, bundle.manifest.specs))
            self._predicting = (newest, bundle, runtime)
        return bundle, runtime

    def _serve(self, lease: float | None, rounds: int | None, connect_timeout: float) -> Visit:
        if not self._serving.acquire(blocking=False):
            raise RunError("this client takes part already: use one client a device, and one run() at a time")
        try:
            return self._take_part(lease, rounds, connect_timeout)
        finally:
            self._serving.release()

    def _take_part(self, lease: float | None, rounds: int | None, connect_timeout: float) -> Visit:
        transport = (
            MqttTransport(self._broker, name=f"edge-{self.device_id}", credentials=self._credentials)
            if isinstance(self._broker, str)
            else self._broker
        )
        link = Link(transport, self._topics, self.device_id)
        link.open(timeout=connect_timeout)
        try:
            session = Session(
                link=link,
                worker=self._worker,
                may_train=self._may_train,
                join_timeout=self._join_timeout,
                lease=lease,
            )
            session.serve(rounds=rounds, stop=self._stop)
        finally:
            link.close()
        return Visit(session.accepted, session.come_back, session.finished)


def _login(broker: str | Transport, credentials: Credentials | None) -> str | None:
    return login_of(broker, credentials) if isinstance(broker, str) else None
