"""The server to embed or to run from the command line: one run over one fleet."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_sdk.bundle import Bundle
from edge_sdk.data import Dataset
from edge_sdk.errors import RunError, TensorError
from edge_sdk.manifest import Manifest
from edge_sdk.statistics import statistics_nbytes
from edge_sdk.tensors import encode
from edge_sdk.transport import Credentials, MqttTransport, Transport
from edge_server.config import RunConfig
from edge_server.coordinator import Coordinator
from edge_server.evaluation import Evaluation, Evaluator
from edge_server.phases import Phase
from edge_server.privacy import check_noise
from edge_server.rounds import RoundResult
from edge_server.rows import RunRow
from edge_server.store import Store

MOST_STATISTICS = 1 << 30
"""Bytes of a device's class statistics."""
MOST_CLASSES = 600
"""Classes whose multiples fit into one message."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a run came to.

    Attributes:
        bundle: the run's bundle with the weights after the last round.
        rounds: a line for each round, those of earlier starts of the same run included.
        evaluation: of the last model; None without evaluation.
        finished: False if the run was stopped before its last round; the same call goes on with it.
    """

    bundle: Bundle
    rounds: tuple[RoundResult, ...]
    evaluation: Evaluation | None
    finished: bool


class Server:
    """One run: it gathers devices, lets them train for the configured rounds, and ends with a new bundle.

    Use it as ``Server(bundle, config, broker=…, work_dir=…).run()``. The same call after a crash goes on
    where the run was.

    Args:
        bundle: what the devices train; a path or a bundle.
        config: the run's settings.
        broker: URL of the MQTT broker, or a transport that is not connected yet.
        work_dir: a folder for the run's durable state, and for what is on its way in.
        store: URL of another database than SQLite in ``work_dir``: with ``postgresql://USER@HOST/NAME``
            (the extra ``postgres``) another machine can go on with the run; devices send it anew what they
            have not finished sending.
        eval_data: labelled data to evaluate every model on.
        credentials: login and TLS files for the broker.
        retain: False for a broker, given by its URL, that keeps no retained messages and has no MQTT 5 to say
            so: devices then ask the server for all that they need.
        on_round: called with every round's line.
        on_status: called with a sentence whenever the run waits, repeats or loses something.

    Raises:
        BundleError, DataError: the bundle or the evaluation data cannot be used.
    """

    def __init__(
        self,
        bundle: Bundle | str | os.PathLike[str],
        config: RunConfig,
        *,
        broker: str | Transport,
        work_dir: str | os.PathLike[str],
        store: str | None = None,
        eval_data: Dataset | None = None,
        credentials: Credentials | None = None,
        retain: bool = True,
        on_round: Callable[[RoundResult], None] | None = None,
        on_status: Callable[[str], None] | None = None,
    ) -> None:
        self._bundle = bundle if isinstance(bundle, Bundle) else Bundle.read(bundle)
        self._config = config.check()
        needed = config.optimiser_of(1).options()
        if missing := sorted(needed - set(self._bundle.manifest.options)):
            raise RunError(
                f"the run needs the option {missing[0]}, without which the bundle was exported: export it "
                f"with --options {','.join(sorted(needed))}"
            )
        if config.selection == "grouped" and self._bundle.manifest.describe is None:
            raise RunError("grouping needs a bundle that can describe data: export it with --describe")
        if config.compression == "zstd" and importlib.util.find_spec("zstandard") is None:
            raise RunError("compression needs zstandard: pip install 'edge-sdk-fl[zstd]'")
        if config.selection == "grouped" and importlib.util.find_spec("sklearn") is None:
            raise RunError("grouping needs scikit-learn: pip install 'edge-sdk-fl[server]'")
        if config.calibration != "none":
            _check_statistics_size(config, self._bundle.manifest)
        if config.noise_multiplier:
            check_noise(self._bundle.manifest)
        if config.augmentation and self._bundle.manifest.classes > MOST_CLASSES:
            raise RunError(f"augmentation is for at most {MOST_CLASSES} classes: set it to 0")
        self._transport = (
            MqttTransport(broker, name=f"edge-server-{config.fleet}", credentials=credentials, retain=retain)
            if isinstance(broker, str)
            else broker
        )
        self._work_dir = Path(work_dir)
        self._store_url = store
        wanted = config.evaluation == "server" and eval_data is not None
        self._evaluator = Evaluator(self._bundle, eval_data) if wanted and eval_data is not None else None
        self._on_round = on_round or (lambda _: None)
        self._on_status = on_status or (lambda _: None)
        self._stop = threading.Event()

    def run(self, *, connect_timeout: float = 10.0) -> Outcome:
        """Run to the last round, or until :meth:`stop`.

        Raises:
            BrokerError: the broker cannot be reached, refuses us, or takes no more messages.
            RunError: too few devices, a run that has ended or whose settings differ, another server on the
                same work folder or on the fleet in the same database, or a store that cannot be written, is
                lost or was taken over. What is durable is kept.
        """
        store = Store(self._work_dir, self._store_url)
        try:
            store.take(self._config.fleet)
            row, fresh = self._find_or_begin(store)
            coordinator = Coordinator(
                transport=self._transport,
                store=store,
                run=row,
                bundle=self._bundle,
                evaluator=self._evaluator,
                on_round=self._on_round,
                on_status=self._on_status,
                first_start=fresh,
            )
            phase = coordinator.serve(self._stop, connect_timeout=connect_timeout)
            figures = [r.figures for r in store.rounds(row.id) if r.figures is not None]
            return Outcome(
                bundle=self._bundle.with_weights(coordinator.weights),
                rounds=tuple(_result(f) for f in figures),
                evaluation=coordinator.last_evaluation,
                finished=phase == Phase.FINISHED,
            )
        finally:
            store.close()
            self._stop.clear()

    def stop(self) -> None:
        """End :meth:`run` soon; what is durable is kept. May be called by any thread."""
        self._stop.set()

    def _find_or_begin(self, store: Store) -> tuple[RunRow, bool]:
        runs = store.runs(self._config.fleet)
        if not runs:
            return self._begin(store), True
        last = runs[-1]
        if last.ended:
            raise RunError(
                f"the run of fleet {last.fleet} in {self._place} has ended after {last.round} rounds: "
                "'edge-sdk runs --out' writes its model; give another --work-dir or --fleet for a new one"
            )
        same = (last.bundle, last.config) == (self._bundle.sha256, self._config)
        if not same and not store.rounds(last.id):
            # Nothing was done yet: it is a start whose settings are being mended.
            store.forget(last.id)
            return self._begin(store), True
        if not same:
            raise RunError(
                f"{self._place} holds an unfinished run of fleet {last.fleet} with other settings or "
                "another bundle: give those to go on with it, or another --work-dir for a new one"
            )
        return last, last.round == 0 and not store.rounds(last.id)

    @property
    def _place(self) -> str:
        return str(self._work_dir) if self._store_url is None else "this database"

    def _begin(self, store: Store) -> RunRow:
        state = self._config.make_strategy().init(self._bundle.weights, self._bundle.manifest.rules)
        return store.begin(self._config, self._bundle.data, encode(state.weights), state.to_bytes())


def _check_statistics_size(config: RunConfig, manifest: Manifest) -> None:
    """RunError, at the start and not at the end, if devices could not send what calibration asks for."""
    try:
        size = statistics_nbytes(
            manifest.classes, manifest.feature_size, config.covariance, config.covariance_rank
        )
    except TensorError as error:
        raise RunError(str(error)) from None
    if size > MOST_STATISTICS:
        raise RunError(
            f"a {config.covariance} covariance of {manifest.feature_size} features for {manifest.classes} "
            f"classes takes {size:,} bytes a device: set covariance to diagonal or low_rank"
        )


def _result(figures: dict[str, Any]) -> RoundResult:
    return RoundResult(**figures)
