"""The run: it alone knows the clock and the wire, and turns what happens into phases of the run.

One thread owns everything here. What an algorithm does is in pure pieces elsewhere; what is durable is
in the store, and is there before it is acknowledged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from edge_sdk.bundle import Bundle
from edge_sdk.errors import EdgeError, RunError
from edge_sdk.tensors import Tensors
from edge_sdk.tensors import encode as encode_tensors
from edge_sdk.transport import Transport
from edge_server.aggregation import State
from edge_server.assignment import Assignment
from edge_server.buffered import BufferedRound
from edge_server.chained import ChainedRound
from edge_server.descriptions import Describing, Descriptions
from edge_server.evaluation import Evaluation, Evaluator
from edge_server.feature_statistics import FeatureStatistics, calibrated
from edge_server.fleet import JITTER, Fleet
from edge_server.opening import next_buffer, open_round, restore_round
from edge_server.phases import Event, Phase, next_phase
from edge_server.privacy import Spent
from edge_server.rounds import Assessment, RoundResult, TrainingRound
from edge_server.rows import RoundRow, RunRow
from edge_server.store import Store

TICK = 0.05
SAY_AFTER, SAY_AGAIN = 5.0, 10.0
"""Seconds after which it is said, and said again, that the run waits for devices."""
PAUSE = 2.0
"""Seconds before a round that fell short is repeated; doubled with every repeat in a row."""
LONGEST_PAUSE = 60.0
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
    _fleet: Fleet = field(init=False)
    _known: Descriptions = field(init=False)
    _state: State = field(init=False)
    _phase: Phase = field(default=Phase.GATHERING, init=False)
    _since: float = field(init=False)
    _not_before: float = field(default=0.0, init=False)
    _round: TrainingRound | None = field(default=None, init=False)
    _described: tuple[int, bool] | None = field(default=None, init=False)
    _statistics: FeatureStatistics | None = field(default=None, init=False)
    _spent: Spent = field(init=False)
    _earlier: list[tuple[BufferedRound, Future[Evaluation] | None, float]] = field(
        default_factory=list, init=False
    )
    _evaluating: Future[Evaluation] | None = field(default=None, init=False)
    _calibrating: Future[Tensors] | None = field(default=None, init=False)
    _seconds: float = field(default=0.0, init=False)
    _progress_at: float = field(init=False)
    _say_again_at: float = field(default=0.0, init=False)
    _repeats: int = field(default=0, init=False)
    _pool: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        manifest, config = self.bundle.manifest, self.run.config
        self._known = Descriptions.restore(self.store, self.run, self.bundle)
        self._spent = Spent.restore(self.store, self.run)
        self._fleet = Fleet(
            transport=self.transport,
            store=self.store,
            run=self.run,
            on_status=self.on_status,
            on_join=self._known.come_anew,
        )
        state = self.store.blob(self.run.state)
        self._state = config.make_strategy().restore(state, manifest.specs, manifest.rules)
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
        self._fleet.open(timeout=connect_timeout)
        self._pool = ThreadPoolExecutor(1, "edge-evaluate")
        try:
            self._publish_first()
            self._restore()
            while self._phase not in (Phase.FINISHED, Phase.STOPPED):
                if stop.is_set():
                    self._fire(Event.INTERRUPTED)
                    break
                self._fleet.receive(TICK)
                # What is queued comes before what time brings: a heartbeat that waits there is no silence.
                for _ in range(QUEUE):
                    if not self._fleet.receive(0.0):
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
        publication = self._fleet.publication
        # A broker that takes less in one message has said so by now, if it speaks MQTT 5.
        publication.fit(self.transport.max_payload)
        model = self.store.blob(self.run.model)
        for stale in self.store.published(self.run.fleet):
            if stale.hash not in (self.bundle.sha256, self.run.model):
                publication.withdraw(stale)
        self._fleet.bundle = publication.announce(self.bundle.data)
        self._fleet.model = publication.announce(model)
        # They are sent when the transport reports that it is connected.
        self.store.set_published(self.run.fleet, publication.refs)

    def _restore(self) -> None:
        """Go on where the store says that the last server ended."""
        rows, config = self.store.rounds(self.run.id), self.run.config
        if not rows:
            return
        # Who was there before is given the time to say so, or the first to do it would be all that are asked.
        self._not_before = time.monotonic() + JITTER + 1
        trained = [row for row in rows if row.kind == "train"][-1]
        unsaid = [row for row in rows if row.status == "aggregated" and row.figures is None]
        self._restore_earlier([row for row in unsaid if row.round < trained.round])
        if rows[-1].kind == "statistics":
            self._round = self._training_of(trained)
            self._restore_statistics(rows[-1])
        elif trained.status == "open":
            self._round = self._training_of(trained)
            for result in self.store.results(trained):
                data = self.store.blob(result.hash)
                self._round.add(result, self._round.check(result.device, data, result.examples))
            self._phase = Phase.TRAINING
            self.on_status(
                f"round {trained.round} goes on with {len(self._round.cohort.accepted)} updates already here"
            )
            # The places are kept for the devices that have them: with those come the same bits.
            self._ask(self._round, kept_until=time.monotonic() + config.grace)
        elif trained.status == "aggregated" and trained.figures is None:
            self._round = self._training_of(trained)
            for result in self.store.results(trained):
                self._round.count(result)
            self._phase = Phase.EVALUATING
        elif self.run.round >= config.rounds:
            self._round = self._training_of(trained)
            self._phase = Phase.EVALUATING
            self._fire(Event.BIASED if config.calibration != "none" else Event.LAST_EVALUATED)

    def _restore_earlier(self, rows: list[RoundRow]) -> None:
        """Say what buffers came to whose server ended while the next one filled; their models are gone."""
        for row in rows:
            done = self._training_of(row)
            assert isinstance(done, BufferedRound)
            for result in self.store.results(row):
                done.count(result)
            self._earlier.append((done, None, 0.0))
        self._conclude_earlier()

    def _restore_statistics(self, row: RoundRow) -> None:
        self._statistics = FeatureStatistics.restore(self.run, self.bundle, row, now=time.monotonic())
        for result in self.store.results(row):
            self._statistics.count(result)
        if row.status == "open":
            self._phase = Phase.CALIBRATING
            self._ask(self._statistics, kept_until=time.monotonic() + self.run.config.grace)
        else:
            self._phase = Phase.EVALUATING if row.figures is None else Phase.FINISHED

    def _training_of(self, row: RoundRow) -> TrainingRound:
        now = time.monotonic()
        return restore_round(
            self.run, self.bundle, self._fleet, self._known, self.weights, row, self.store, now=now
        )

    def _say_goodbye(self, stop: threading.Event) -> None:
        """Wait, for a while, until the devices have taken the last model; then clear the broker."""
        self._fleet.say_goodbye()
        began = time.monotonic()
        # After a restart the devices have yet to say that they are there.
        least = began if self._fleet.present(began) else began + JITTER + 1
        while time.monotonic() < began + self.run.config.deadline and not stop.is_set():
            if time.monotonic() > least and not self._fleet.present(time.monotonic()):
                break
            self._fleet.receive(TICK)
        for ref in list(self._fleet.publication.refs):
            self._fleet.publication.withdraw(ref)
        self.store.set_published(self.run.fleet, [])

    # What time brings.

    def _tick(self, now: float) -> None:
        self._fleet.tick(now)
        if self._phase == Phase.GATHERING:
            self._gather(now)
        elif self._phase == Phase.DESCRIBING:
            if self._fleet.collected(now):
                self._end_describing()
        elif self._phase == Phase.TRAINING:
            self._conclude_earlier()
            if self._fleet.collected(now):
                enough = len(self._training().cohort.accepted) >= self.run.config.min_participants
                if enough and isinstance(self._round, BufferedRound):
                    self._flush(self._round, now)
                elif enough:
                    self._aggregate(now)
                elif isinstance(self._round, BufferedRound):
                    self._check_patience(now)
                    if self._round.cohort.exhausted and now >= self._not_before:
                        if self._repeats:
                            self._round.reconsider(self._fleet.present(now))
                        self._pause(now)
                    self._ask(self._round, going_on=True)
                else:
                    self._repeat(now)
        elif self._phase == Phase.EVALUATING:
            self._evaluate(now)
        elif self._phase == Phase.CALIBRATING:
            self._calibrate(now)

    def _gather(self, now: float) -> None:
        present, config = self._fleet.present(now), self.run.config
        needed = config.needed()
        if len(present) >= needed and now >= self._not_before:
            undescribed = self._known.undescribed(present)
            # Once a round, or devices that come and go could put it off for ever.
            occasion = (self.run.round, self._known.plan is None)
            if undescribed and self._described != occasion:
                self._described = occasion
                self._fire(Event.UNDESCRIBED)
                self._ask(Describing.of(self.run, self._known, undescribed, now=now))
            elif self._known.plan is None:
                self.store.set_multiples(self.run.id, self._known.make_plan())
            else:
                self._open_round(now)
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
        self._check_patience(now)

    def _check_patience(self, now: float) -> None:
        config = self.run.config
        if now - self._progress_at > config.patience:
            self._fire(Event.PATIENCE_OUT)
            raise RunError(
                f"no round was completed for {config.patience:.0f} s ({len(self._fleet.present(now))} of "
                f"{config.needed()} devices are here); the run is kept: give the same command to go on"
            )

    def _end_describing(self) -> None:
        work = self._fleet.work
        assert isinstance(work, Describing)
        self._fleet.call_off("the descriptions are in")
        self._known.conclude(work.asked)
        self._fire(Event.DESCRIBED)

    def _open_round(self, now: float) -> None:
        attempts = self.store.rounds(self.run.id, number=self.run.round + 1)
        self._round = open_round(
            self.run,
            self.bundle,
            self._fleet,
            self._known,
            self.weights,
            attempt=attempts[-1].attempt + 1 if attempts else 0,
            now=now,
        )
        self.store.open_round(self._round.row)
        self.first_start = False
        self._fire(Event.ENOUGH_DEVICES)
        self._ask(self._round)

    def _ask(self, work: Assignment, *, kept_until: float = 0.0, going_on: bool = False) -> None:
        def on_called() -> None:
            if isinstance(work, TrainingRound) and not isinstance(work, ChainedRound):
                self.store.set_selected(work.row, work.cohort.selected)

        now = time.monotonic()
        self._fleet.ask(work, now, on_called=on_called, kept_until=kept_until, going_on=going_on)

    def _aggregate(self, now: float) -> None:
        """Apply the mean: model, state and round change in one transaction."""
        done = self._training()
        self._fleet.call_off("the round is complete")
        self._adopt(done.row, self.run.config.make_strategy().apply(self._state, done.mean()))
        self._spent.add(done.cohort.accepted)
        self._seconds = now - done.began
        self._progress_at, self._repeats = now, 0
        self._fire(Event.COHORT_COMPLETE)

    def _flush(self, done: BufferedRound, now: float) -> None:
        """The buffer is full: its mean makes a model, and the devices at work go on."""
        config, publication = self.run.config, self._fleet.publication
        before = encode_tensors(self.weights)
        self._adopt(done.row, config.make_strategy().apply(self._state, done.mean()))
        self._progress_at, self._repeats = now, 0
        evaluator = self.evaluator if config.evaluation == "server" else None
        self._earlier.append(
            (
                done,
                self._pool.submit(evaluator.evaluate, self.weights) if evaluator else None,
                now - done.began,
            )
        )
        if self.run.round >= config.rounds:
            self._fleet.call_off("the last round is complete")
            self._fire(Event.LAST_FLUSHED)
            return
        # Who has begun with the model before may still have to fetch it.
        done.models[done.row.round] = publication.lend(before)
        self._round = next_buffer(self.run, self.bundle, self._fleet, self._known, done, now=now)
        for number in done.models.keys() - self._round.models.keys():
            publication.take_back(done.models[number])
        self.store.open_round(self._round.row)
        self._ask(self._round, going_on=True)

    def _conclude_earlier(self) -> None:
        """Buffers are evaluated while the next ones fill."""
        while self._earlier and (self._earlier[0][1] is None or self._earlier[0][1].done()):
            done, evaluating, seconds = self._earlier.pop(0)
            evaluation = evaluating.result() if evaluating is not None else None
            result = done.result(evaluation, model_bytes=self._fleet.model.size, seconds=seconds)
            self.store.set_figures(done.row, result.to_dict())
            self.last_evaluation = evaluation
            self.on_round(result)

    def _adopt(self, row: RoundRow, new: State) -> None:
        """Make a new state durable, then publish its model in place of the old one."""
        fleet, publication = self._fleet, self._fleet.publication
        model, state = encode_tensors(new.weights), new.to_bytes()
        self.store.aggregate(row, self.run.config, model=model, state=state, old_state=self.run.state)
        self._state, self.run = new, self.store.get(self.run.id)
        old, fleet.model = fleet.model, publication.announce(model)
        self.store.set_published(self.run.fleet, publication.refs)
        publication.send(fleet.model)
        if old.hash != fleet.model.hash:
            publication.withdraw(old)

    def _repeat(self, now: float) -> None:
        accepted, row = len(self._training().cohort.accepted), self._training().row
        self._fleet.call_off("too few devices delivered; the round is repeated")
        self.store.repeat(row)
        self._round = None
        self._pause(now)
        self._fire(Event.COHORT_SHORT)
        self.on_status(
            f"round {row.round} is repeated: {accepted} of at least {self.run.config.min_participants} "
            f"updates came from {len(row.selected)} devices"
        )

    def _pause(self, now: float) -> None:
        """Devices that all decline would be asked, and their batteries drained, without it."""
        self._not_before = now + min(PAUSE * 2**self._repeats, LONGEST_PAUSE)
        self._repeats += 1

    def _evaluate(self, now: float) -> None:
        config, present, work = self.run.config, self._fleet.present(now), self._fleet.work
        if self._earlier:
            self._conclude_earlier()
            if not self._earlier:
                self._fire(Event.BIASED if config.calibration != "none" else Event.LAST_EVALUATED)
        elif self._evaluating is not None:
            if self._evaluating.done():
                self._conclude(self._evaluating.result())
        elif isinstance(work, Assessment):
            if self._fleet.collected(now):
                self._fleet.call_off("the evaluation is in")
                self._conclude(work.evaluation())
        elif config.evaluation == "server" and self.evaluator is not None:
            self._evaluating = self._pool.submit(self.evaluator.evaluate, self._state.weights)
        elif config.evaluation == "devices" and present:
            if now >= self._not_before:
                again = self._statistics is not None
                self._ask(Assessment.open(self._training(), present, again=again, now=now))
        elif config.evaluation != "devices" or now - self._since > config.grace:
            self._conclude(None)

    def _conclude(self, evaluation: Evaluation | None) -> None:
        done = self._statistics or self._training()
        result = done.result(evaluation, model_bytes=self._fleet.model.size, seconds=self._seconds)
        result = replace(result, epsilon=self._spent.epsilon)
        self.store.set_figures(done.row, result.to_dict())
        self.last_evaluation, self._evaluating = evaluation, None
        last, config = self.run.round >= self.run.config.rounds, self.run.config
        if last and config.calibration != "none" and self._statistics is None:
            self._fire(Event.BIASED)
        else:
            self._fire(Event.LAST_EVALUATED if last else Event.EVALUATED)
        self.on_round(result)

    def _calibrate(self, now: float) -> None:
        if self._calibrating is not None:
            if self._calibrating.done():
                self._end_calibrating(now)
        elif self._statistics is None:
            if present := self._fleet.present(now):
                if now >= self._not_before:
                    self._statistics = FeatureStatistics.of(self.run, self.bundle, present, now=now)
                    self.store.open_round(self._statistics.row)
                    self._ask(self._statistics)
            elif now - self._since > self.run.config.grace:
                self._stay_uncalibrated("no device is here")
        elif self._fleet.collected(now):
            self._fleet.call_off("the statistics are in")
            self._calibrating = self._pool.submit(
                calibrated, self.store, self._statistics.row, self.bundle, self.weights, self.run.config
            )

    def _end_calibrating(self, now: float) -> None:
        assert self._calibrating is not None
        assert self._statistics is not None
        try:
            weights = self._calibrating.result()
        except EdgeError as error:
            self._stay_uncalibrated(str(error))
            return
        self._seconds = now - self._statistics.began
        self._adopt(self._statistics.row, replace(self._state, weights=weights))
        self._fire(Event.CALIBRATED)

    def _stay_uncalibrated(self, reason: str) -> None:
        self.on_status(f"the classifier is not calibrated: {reason}")
        self._fire(Event.NOT_CALIBRATED)

    def _fire(self, event: Event) -> None:
        self._phase, self._since = next_phase(self._phase, event), time.monotonic()
        self._say_again_at = self._since + SAY_AFTER

    def _training(self) -> TrainingRound:
        assert self._round is not None
        return self._round
