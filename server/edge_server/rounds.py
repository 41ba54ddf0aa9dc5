"""One attempt at a round: what its devices are asked, which updates it takes, what they come to."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from edge_sdk.bundle import Bundle
from edge_sdk.errors import ProtocolError
from edge_sdk.protocol.messages import Key, Offer, Ref, Report, Task, number, to_number
from edge_sdk.tensors import decode
from edge_sdk.update import check_update
from edge_sdk.work import SAFETENSORS_OVERHEAD
from edge_server.aggregation import Precision, WeightedSum
from edge_server.cohort import Cohort, Standing
from edge_server.config import RunConfig
from edge_server.evaluation import Evaluation
from edge_server.selection import device_seed, random_order
from edge_server.store import AcceptedUpdate, RoundRow, RunRow


@dataclass(frozen=True, slots=True)
class RoundResult:
    """A line of a run.

    Attributes:
        round: from 1.
        attempt: how often the round had to be repeated before.
        accuracy: in [0, 1], and ``loss`` in nats, of the model after the round; None without evaluation.
        participants: devices whose updates are in the mean.
        examples: Σ n_k.
        bytes_up: bytes of their updates.
        bytes_down: bytes of the model, once for each of them.
        seconds: from the first task to the model; evaluation is not counted.
    """

    round: int
    attempt: int
    accuracy: float | None
    loss: float | None
    participants: int
    examples: int
    bytes_up: int
    bytes_down: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class TrainingRound:
    """An attempt while it is open."""

    row: RoundRow
    cohort: Cohort
    precision: Precision
    total: WeightedSum
    began: float
    examples: int = 0
    bytes_up: int = 0
    declared: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        run: RunRow,
        bundle: Bundle,
        present: list[str],
        *,
        round_number: int,
        attempt: int,
        now: float,
    ) -> TrainingRound:
        """Select a cohort among the devices that are present."""
        config = run.config
        wanted = config.cohort_size(len(present))
        order = random_order(present, seed=config.seed, round_number=round_number, attempt=attempt)
        cohort = Cohort(wanted=wanted, asked=math.ceil(wanted * config.over_selection), order=order)
        precision = config.precision(wanted)
        row = RoundRow(
            run=run.id,
            round=round_number,
            attempt=attempt,
            status="open",
            wanted=wanted,
            selected=cohort.call(),
            exponents=dict(precision.exponents),
            model_before=run.model,
            model_after=None,
            figures=None,
        )
        total = WeightedSum(bundle.manifest.specs, bundle.manifest.rules, precision)
        return cls(row=row, cohort=cohort, precision=precision, total=total, began=now)

    @classmethod
    def restore(cls, run: RunRow, bundle: Bundle, row: RoundRow, *, now: float) -> TrainingRound:
        """The attempt as the store has it, without its accepted updates: see :meth:`add`."""
        config = run.config
        asked = math.ceil(row.wanted * config.over_selection)
        precision = config.precision(row.wanted)
        total = WeightedSum(bundle.manifest.specs, bundle.manifest.rules, precision)
        cohort = Cohort.restored(wanted=row.wanted, asked=asked, selected=row.selected)
        return cls(row=row, cohort=cohort, precision=precision, total=total, began=now)

    def is_keyed(self, key: Key) -> bool:
        """Whether a message is about this attempt."""
        return key.key == (self.row.run, self.row.round, self.row.attempt)

    def largest_update(self, bundle: Bundle) -> int:
        """Bytes that an update may have."""
        return bundle.manifest.nbytes + SAFETENSORS_OVERHEAD

    def task(
        self, config: RunConfig, device: str, nonce: str, *, bundle: Ref, model: Ref, left: float
    ) -> Task:
        """What ``device`` is asked."""
        optimiser = config.optimiser_of(self.row.round)
        return Task(
            run=self.row.run,
            round=self.row.round,
            attempt=self.row.attempt,
            kind="train",
            nonce=nonce,
            bundle=bundle,
            model=model,
            deadline=max(int(left), 1),
            epochs=config.epochs,
            batch_size=config.batch_size,
            lr=to_number(optimiser.lr),
            weight_decay=to_number(optimiser.weight_decay),
            momentum=to_number(optimiser.momentum),
            keep_momentum=config.keep_momentum,
            proximal=to_number(optimiser.proximal),
            clip_norm=to_number(optimiser.clip_norm),
            seed=device_seed(config.seed, self.row.round, device),
            bounds=dict(self.precision.bounds),
            exponents=dict(self.precision.exponents),
        )

    def refusal(self, config: RunConfig, device: str, offer: Offer) -> str | None:
        """Why the update that ``offer`` announces will not be taken; None if it will."""
        standing = self.cohort.standing(device)
        if standing is None:
            return f"this device was not asked in round {self.row.round}"
        if standing == Standing.ACCEPTED:
            return f"this device has delivered another update in round {self.row.round}"
        if standing == Standing.DROPPED:
            return f"this device has declined round {self.row.round}, or its update was refused"
        if self.cohort.complete:
            return f"round {self.row.round} has all its updates"
        if not 1 <= offer.examples <= config.max_examples:
            return f"{offer.examples} examples are not between 1 and {config.max_examples}"
        if offer.examples > self.declared.get(device, offer.examples):
            return f"{offer.examples} examples, but {self.declared[device]} were declared for this round"
        return None

    def add(self, bundle: Bundle, update: AcceptedUpdate, data: bytes) -> None:
        """Add an update to the mean; nothing of it is added if anything is wrong with it.

        Raises:
            TensorError: not the model's tensors, not finite, or beyond a bound.
        """
        self.total.add(self.check(bundle, data), update.examples)
        self.count(update)

    def count(self, update: AcceptedUpdate) -> None:
        """Note that an update is in the mean."""
        self.cohort.accept(update.device)
        self.hashes[update.device] = update.hash
        self.examples += update.examples
        self.bytes_up += update.size

    def check(self, bundle: Bundle, data: bytes) -> dict[str, Any]:
        """The update's tensors, validated whole; TensorError as for :meth:`add`."""
        tensors = decode(data, bundle.manifest.specs)
        check_update(tensors, bundle.manifest.rules, self.precision.bounds)
        return tensors

    def result(self, evaluation: Evaluation | None, *, model_bytes: int, seconds: float) -> RoundResult:
        """The round's line."""
        participants = len(self.cohort.accepted)
        return RoundResult(
            round=self.row.round,
            attempt=self.row.attempt,
            accuracy=evaluation.accuracy if evaluation else None,
            loss=evaluation.loss if evaluation else None,
            participants=participants,
            examples=self.examples,
            bytes_up=self.bytes_up,
            bytes_down=participants * model_bytes,
            seconds=seconds,
        )


@dataclass(slots=True, kw_only=True)
class Assessment:
    """An evaluation on the devices' held-out shares, as sums that add up."""

    row: RoundRow
    cohort: Cohort
    began: float
    loss: float = 0.0
    correct: int = 0
    examples: int = 0

    @classmethod
    def open(
        cls, training: RoundRow, present: list[str], *, wanted: int, seed: int, now: float
    ) -> Assessment:
        """Ask ``wanted`` of the devices that are present."""
        order = random_order(present, seed=seed + 1, round_number=training.round, attempt=training.attempt)
        cohort = Cohort(wanted=wanted, asked=wanted, order=order)
        cohort.call()
        return cls(row=training, cohort=cohort, began=now)

    def task(self, nonce: str, *, bundle: Ref, model: Ref, left: float) -> Task:
        """What a device is asked."""
        return Task(
            run=self.row.run,
            round=self.row.round,
            attempt=self.row.attempt,
            kind="evaluate",
            nonce=nonce,
            bundle=bundle,
            model=model,
            deadline=max(int(left), 1),
        )

    def add(self, device: str, report: Report, *, max_examples: int) -> None:
        """Add a device's sums, once; ProtocolError if they cannot be true."""
        if self.cohort.standing(device) not in (Standing.ASKED, Standing.TAKEN, Standing.LOST):
            return
        loss = number(report.loss)
        if report.correct > report.examples or report.examples > max_examples or loss < 0:
            raise ProtocolError("the sums of an evaluation contradict one another")
        self.cohort.accept(device)
        self.loss += loss
        self.correct += report.correct
        self.examples += report.examples

    def evaluation(self) -> Evaluation | None:
        """The mean over all held-out examples; None if there were none."""
        if not self.examples:
            return None
        return Evaluation(self.correct / self.examples, self.loss / self.examples, self.examples)
