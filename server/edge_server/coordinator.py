"""The run: it alone knows the clock and the wire, and turns what happens into phases of the run.

One thread owns everything here. What an algorithm does is in pure pieces elsewhere; what is durable is
in the store, and is there before it is acknowledged.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from edge_sdk.bundle import Bundle
from edge_sdk.errors import ProtocolError, RunError, TensorError
from edge_sdk.protocol import Chunk, Topics
from edge_sdk.protocol.messages import (
    PROTOCOL,
    Cancel,
    Declined,
    Finished,
    FromDevice,
    Grant,
    Here,
    Join,
    Key,
    Leave,
    Offer,
    Ref,
    Refused,
    Report,
    Taken,
    Task,
    Welcome,
    Who,
)
from edge_sdk.tensors import Tensors
from edge_sdk.tensors import encode as encode_tensors
from edge_sdk.transport import Connected, Disconnected, Transport
from edge_server.admission import Admission
from edge_server.aggregation import State
from edge_server.call import Call
from edge_server.cohort import Cohort, Standing
from edge_server.desk import Desk
from edge_server.evaluation import Evaluation, Evaluator
from edge_server.phases import Event, Phase, next_phase
from edge_server.publication import Publication
from edge_server.registry import HEARTBEAT, Registry
from edge_server.rounds import Assessment, RoundResult, TrainingRound
from edge_server.store import RunRow, Store

logger = logging.getLogger(__name__)

TICK = 0.05
JITTER = 2
"""Seconds over which devices spread their answers to ``who``."""
SAY_AFTER, SAY_AGAIN = 5.0, 10.0
"""Seconds after which it is said, and said again, that the run waits for devices."""
PAUSE = 2.0
"""Seconds before a round that fell short is repeated; doubled with every repeat in a row."""
LONGEST_PAUSE = 60.0
NEWCOMER = 3.0
"""Seconds after its start within which a server that hears another one gives way."""
QUEUE = 1000
"""Events taken in at a time."""


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """Runs ``run`` to its end over a transport that is not yet connected.

    Args:
        evaluator: for evaluation on the server's data.
        on_round: called with every round's line.
        on_status: called with a sentence whenever the run waits, repeats or loses something.
        first_start: whether the run has just been recorded, so that ``join_timeout`` counts.
    """

    transport: Transport
    store: Store
    run: RunRow
    bundle: Bundle
    evaluator: Evaluator | None
    on_round: Callable[[RoundResult], None]
    on_status: Callable[[str], None]
    first_start: bool
    last_evaluation: Evaluation | None = field(default=None, init=False)
    _desk: Desk = field(init=False)
    _publication: Publication = field(init=False)
    _registry: Registry = field(default_factory=Registry, init=False)
    _admission: Admission = field(init=False)
    _state: State = field(init=False)
    _phase: Phase = field(default=Phase.GATHERING, init=False)
    _since: float = field(init=False)
    _not_before: float = field(default=0.0, init=False)
    _round: TrainingRound | None = field(default=None, init=False)
    _assessment: Assessment | None = field(default=None, init=False)
    _evaluating: Future[Evaluation] | None = field(default=None, init=False)
    _seconds: float = field(default=0.0, init=False)
    _call: Call | None = field(default=None, init=False)
    _progress_at: float = field(init=False)
    _say_again_at: float = field(default=0.0, init=False)
    _token: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _opened_at: float = field(default=0.0, init=False)
    _repeats: int = field(default=0, init=False)
    _model: Ref = field(init=False)
    _bundle_ref: Ref = field(init=False)
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        topics = Topics(self.run.fleet)
        self._desk = Desk(self.transport, topics)
        self._publication = Publication(self.transport, topics, chunk=self.run.config.chunk_bytes)
        self._admission = Admission(
            desk=self._desk,
            store=self.store,
            bundle=self.bundle,
            config=self.run.config,
            on_refused=self.on_status,
        )
        manifest = self.bundle.manifest
        strategy, state = self.run.config.make_strategy(), self.store.blob(self.run.state)
        self._state = strategy.restore(state, manifest.specs, manifest.rules)
        self._since = self._progress_at = time.monotonic()
        self._say_again_at = self._since + SAY_AFTER

    @property
    def weights(self) -> Tensors:
        """The present model."""
        return self._state.weights

    def serve(self, stop: threading.Event, *, connect_timeout: float) -> Phase:
        """Run until the last round is done, the run cannot go on, or ``stop`` is set.

        Raises:
            BrokerError: the broker cannot be reached, refuses us, or takes no more messages.
            RunError: too few devices at the start, patience is out, or the store cannot be written.
        """
        self._desk.open(timeout=connect_timeout)
        self._opened_at = time.monotonic()
        self._pool = ThreadPoolExecutor(1, "edge-evaluate")
        try:
            self._publish_first()
            self._restore()
            while self._phase not in (Phase.FINISHED, Phase.STOPPED):
                if stop.is_set():
                    self._fire(Event.INTERRUPTED)
                    break
                self._receive(TICK)
                # What is queued comes before what time brings: a heartbeat that waits there is no silence.
                for _ in range(QUEUE):
                    if not self._receive(0.0):
                        break
                self._tick(time.monotonic())
            if self._phase == Phase.FINISHED:
                self._say_goodbye(stop)
                self.store.end(self.run.id)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self.transport.close()
        return self._phase

    # Start and end.

    def _publish_first(self) -> None:
        # A broker that takes less in one message has said so by now, if it speaks MQTT 5.
        self._publication.fit(self.transport.max_payload)
        model = self.store.blob(self.run.model)
        for stale in self.store.published(self.run.fleet):
            if stale.hash not in (self.bundle.sha256, self.run.model):
                self._publication.withdraw(stale)
        self._bundle_ref = self._publication.announce(self.bundle.data)
        self._model = self._publication.announce(model)
        # They are sent when the transport reports that it is connected.
        self.store.set_published(self.run.fleet, self._publication.refs)

    def _restore(self) -> None:
        """Go on where the store says that the last server ended."""
        rows = self.store.rounds(self.run.id)
        if not rows:
            return
        last, now = rows[-1], time.monotonic()
        if last.status == "open":
            self._round = TrainingRound.restore(self.run, self.bundle, last, now=now)
            for update in self.store.updates(last):
                self._round.add(self.bundle, update, self.store.blob(update.hash))
            self._admission.open(self._round)
            self._phase = Phase.TRAINING
            # The places are kept for the devices that have them: with those come the same bits.
            self._call_out(self._round.cohort, now, kept_until=now + self.run.config.grace)
            self.on_status(
                f"round {last.round} goes on with {len(self._round.cohort.accepted)} updates already here"
            )
        elif last.status == "aggregated" and last.figures is None:
            self._round = TrainingRound.restore(self.run, self.bundle, last, now=now)
            for update in self.store.updates(last):
                self._round.count(update)
            self._phase = Phase.EVALUATING
        elif self.run.round >= self.run.config.rounds:
            self._phase = Phase.FINISHED

    def _say_goodbye(self, stop: threading.Event) -> None:
        """Wait, for a while, until the devices have taken the last model; then clear the broker."""
        self._desk.tell_all(Finished(run=self.run.id, model=self._model))
        began = time.monotonic()
        # After a restart the devices have yet to say that they are there.
        least = began if self._registry.present(began) else began + JITTER + 1
        while time.monotonic() < began + self.run.config.deadline and not stop.is_set():
            if time.monotonic() > least and not self._registry.present(time.monotonic()):
                break
            self._receive(TICK)
        for ref in list(self._publication.refs):
            self._publication.withdraw(ref)
        self.store.set_published(self.run.fleet, [])

    # What arrives.

    def _receive(self, timeout: float) -> bool:
        """Take one event in; False if there was none."""
        event = self._desk.receive(timeout)
        if isinstance(event, Connected):
            # A broker that has restarted has lost what it retained, and devices may have come meanwhile.
            self._publication.send_all()
            self._desk.tell_all(Who(jitter=JITTER, server=self._token))
        elif isinstance(event, Who):
            self._on_server(event, time.monotonic())
        elif isinstance(event, Disconnected):
            if event.fatal:
                raise RunError(f"the broker refuses the server: {event.reason}")
            self.on_status(f"the connection to the broker is lost ({event.reason}); trying again")
        elif event is not None:
            device, content = event
            now = time.monotonic()
            try:
                if isinstance(content, Chunk):
                    self._admission.chunk(device, content, now)
                else:
                    self._on_message(device, content, now)
            except (ProtocolError, TensorError) as error:
                logger.warning("dropped what %s sent: %s", device, error)
        return event is not None

    def _on_server(self, who: Who, now: float) -> None:
        """Of two servers on one fleet the newcomer gives way: each would call off the other's work."""
        if who.server == self._token:
            return
        if now - self._opened_at < NEWCOMER:
            raise RunError(
                f"another server serves fleet {self.run.fleet} on this broker: stop it, or give --fleet"
            )
        self._desk.tell_all(Who(jitter=JITTER, server=self._token))

    def _on_message(self, device: str, message: FromDevice, now: float) -> None:
        match message:
            case Join():
                self._on_join(device, message, now)
            case Here():
                if not self._registry.here(device, message.nonce, message.examples, now):
                    self._desk.tell(device, Who(jitter=0, server=self._token))
            case Leave():
                if self._registry.leave(device, message.nonce):
                    self._on_gone(device, now)
            case Grant():
                self._publication.serve(device, message)
            case Offer():
                self._admission.offer(device, message)
            case Taken() if self._is_current(message):
                self._on_taken(device, message)
            case Declined() if self._is_current(message):
                self._on_declined(device, message)
            case Report():
                if self._assessment is not None and self._is_current(message):
                    self._assessment.add(device, message, max_examples=self.run.config.max_examples)
                self._admission.acknowledge(device, message, None)

    def _on_join(self, device: str, join: Join, now: float) -> None:
        if join.protocol != PROTOCOL:
            reason = f"the server speaks protocol {PROTOCOL}, the device {join.protocol}: update edge-sdk-fl"
            self._desk.tell(device, Refused(nonce=join.nonce, code="protocol", reason=reason))
            return
        if refusal := self._registry.join(device, join, now):
            self._desk.tell(device, Refused(nonce=join.nonce, code="id-in-use", reason=refusal))
            return
        call = self._call
        at_work = call is not None and device in call.cohort.pending
        come_back = None
        if call is not None and not at_work:
            if join.examples:
                call.cohort.volunteer(device)
            if join.lease is not None and not call.cohort.has_place_for(device):
                come_back = max(int(call.deadline - now), 1)
        self._desk.tell(
            device,
            Welcome(
                nonce=join.nonce,
                run=self.run.id,
                bundle=self._bundle_ref,
                model=self._model,
                heartbeat=HEARTBEAT,
                come_back=come_back,
            ),
        )
        if self._phase == Phase.FINISHED:
            self._desk.tell(device, Finished(run=self.run.id, model=self._model))
        if call is not None and at_work:
            call.ask([device], now)

    def _on_gone(self, device: str, now: float) -> None:
        if self._call is None:
            return
        self._call.cohort.withdraw(device)
        self._admission.hold(device)
        if not self._registry.holds_lease(device, now) and self._call.cohort.lose(device):
            self.on_status(f"device {device} has gone in round {self._training().row.round}")

    def _on_taken(self, device: str, taken: Taken) -> None:
        if self._call is None or (taken.kind == "train") != (self._phase == Phase.TRAINING):
            return
        cohort = self._call.cohort
        cohort.take(device)
        if taken.kind == "train" and taken.examples is not None and cohort.standing(device) == Standing.TAKEN:
            self._training().declared.setdefault(device, taken.examples)

    def _on_declined(self, device: str, declined: Declined) -> None:
        if self._call is not None and (declined.kind == "train") == (self._phase == Phase.TRAINING):
            self._admission.forget(device)
            if self._call.cohort.drop(device):
                self.on_status(f"device {device} declines round {declined.round}: {declined.reason}")

    # What time brings.

    def _tick(self, now: float) -> None:
        overdue = self._call.overdue(now) if self._call is not None else []
        for device in [*self._registry.expire(now), *overdue]:
            self._on_gone(device, now)
        if self._phase == Phase.GATHERING:
            self._gather(now)
        elif self._phase == Phase.TRAINING:
            self._admission.tick(now)
            if self._call is None or self._call.collected(now):
                enough = len(self._training().cohort.accepted) >= self.run.config.min_participants
                if enough:
                    self._aggregate(now)
                else:
                    self._repeat(now)
        elif self._evaluating is not None:
            if self._evaluating.done():
                self._conclude(self._evaluating.result())
        elif self._assessment is None or self._call is None:
            self._begin_evaluation(now)
        elif self._call.collected(now):
            self._conclude(self._assessment.evaluation())

    def _gather(self, now: float) -> None:
        present, config = self._registry.present(now), self.run.config
        needed = config.needed()
        if len(present) >= needed and now >= self._not_before:
            self._open_round(present, now)
            return
        if len(present) < needed and now >= self._say_again_at:
            self._say_again_at = now + SAY_AGAIN
            self.on_status(f"round {self.run.round + 1} waits: {len(present)} of {needed} devices are here")
        if self.first_start and now - self._since > config.join_timeout:
            self._fire(Event.TOO_FEW_AT_START)
            raise RunError(
                f"{len(present)} of the {needed} devices that the run needs have joined fleet "
                f"{config.fleet} within {config.join_timeout:.0f} s: start more, or lower --min-devices"
            )
        if now - self._progress_at > config.patience:
            self._fire(Event.PATIENCE_OUT)
            raise RunError(
                f"no round was completed for {config.patience:.0f} s ({len(present)} of {needed} devices are "
                "here); the run is kept: give the same command to go on"
            )

    def _open_round(self, present: list[str], now: float) -> None:
        number = self.run.round + 1
        attempts = self.store.rounds(self.run.id, number=number)
        attempt = attempts[-1].attempt + 1 if attempts else 0
        self._round = TrainingRound.open(
            self.run, self.bundle, present, round_number=number, attempt=attempt, now=now
        )
        self.store.open_round(self._round.row)
        self._admission.open(self._round)
        self.first_start = False
        self._fire(Event.ENOUGH_DEVICES)
        self._call_out(self._round.cohort, now)

    def _call_out(self, cohort: Cohort, now: float, *, kept_until: float = 0.0) -> None:
        """Put a cohort to work on the open round or on its evaluation."""
        config, training, assessment = self.run.config, self._training(), self._assessment

        def make_task(device: str, nonce: str, left: float) -> Task:
            refs = {"bundle": self._bundle_ref, "model": self._model}
            if assessment is not None:
                return assessment.task(nonce, left=left, **refs)
            return training.task(config, device, nonce, left=left, **refs)

        def on_called() -> None:
            if assessment is None:
                self.store.set_selected(training.row, cohort.selected)

        self._call = Call(
            cohort=cohort,
            deadline=now + config.deadline,
            registry=self._registry,
            desk=self._desk,
            make_task=make_task,
            on_called=on_called,
            grace=config.grace,
            kept_until=kept_until,
        )
        self._call.ask(cohort.pending, now)

    def _aggregate(self, now: float) -> None:
        """Apply the mean: model, state and round change in one transaction."""
        done, config = self._training(), self.run.config
        self._call_off(done, "the round is complete")
        self._state = config.make_strategy().apply(self._state, done.total.mean())
        model, state = encode_tensors(self._state.weights), self._state.to_bytes()
        self.store.aggregate(
            done.row, model=model, state=state, old_state=self.run.state, keep=config.keep_updates
        )
        self.run = self.store.get(self.run.id)
        old, self._model = self._model, self._publication.announce(model)
        self.store.set_published(self.run.fleet, self._publication.refs)
        self._publication.send(self._model)
        if old.hash != self._model.hash:
            self._publication.withdraw(old)
        self._seconds = now - done.began
        self._progress_at, self._repeats = now, 0
        self._fire(Event.COHORT_COMPLETE)

    def _repeat(self, now: float) -> None:
        accepted, row = len(self._training().cohort.accepted), self._training().row
        self._call_off(self._training(), "too few devices delivered; the round is repeated")
        self.store.repeat(row)
        self._round = None
        # Devices that all decline would otherwise be asked, and their batteries drained, without a pause.
        self._not_before = now + min(PAUSE * 2**self._repeats, LONGEST_PAUSE)
        self._repeats += 1
        self._fire(Event.COHORT_SHORT)
        self.on_status(
            f"round {row.round} is repeated: {accepted} of at least {self.run.config.min_participants} "
            f"updates came from {len(row.selected)} devices"
        )

    def _call_off(self, training: TrainingRound, reason: str) -> None:
        row = training.row
        for device in [*training.cohort.pending, *training.cohort.lost]:
            cancel = Cancel(run=row.run, round=row.round, attempt=row.attempt, kind="train", reason=reason)
            self._desk.tell(device, cancel)
        self._admission.close()
        self._call = None

    def _begin_evaluation(self, now: float) -> None:
        config, present = self.run.config, self._registry.present(now)
        if config.evaluation == "server" and self.evaluator is not None:
            self._evaluating = self._pool.submit(self.evaluator.evaluate, self._state.weights)
        elif config.evaluation == "devices" and present:
            wanted = config.cohort_size(len(present))
            row = self._training().row
            self._assessment = Assessment.open(row, present, wanted=wanted, seed=config.seed, now=now)
            self._call_out(self._assessment.cohort, now)
        elif config.evaluation != "devices" or now - self._since > config.grace:
            self._conclude(None)

    def _conclude(self, evaluation: Evaluation | None) -> None:
        done = self._training()
        result = done.result(evaluation, model_bytes=self._model.size, seconds=self._seconds)
        self.store.set_figures(done.row, result.to_dict())
        self.last_evaluation = evaluation
        self._round = self._assessment = self._evaluating = self._call = None
        last = self.run.round >= self.run.config.rounds
        self._fire(Event.LAST_EVALUATED if last else Event.EVALUATED)
        self.on_round(result)

    def _fire(self, event: Event) -> None:
        self._phase, self._since = next_phase(self._phase, event), time.monotonic()
        self._say_again_at = self._since + SAY_AFTER

    def _training(self) -> TrainingRound:
        assert self._round is not None
        return self._round

    def _is_current(self, key: Key) -> bool:
        return self._round is not None and self._round.is_keyed(key)
