"""One attempt at a round: devices train, and their updates come to a mean; then some evaluate the model."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from edge_sdk.bundle import Bundle
from edge_sdk.codec import unpack
from edge_sdk.errors import ProtocolError
from edge_sdk.protocol.messages import Augmentation, Report, number, to_number
from edge_sdk.update import check_update
from edge_sdk.work import SAFETENSORS_OVERHEAD
from edge_server.aggregation import MeanUpdate, NoisySum, Precision, RobustMean, WeightedSum, bound_norm
from edge_server.assignment import Assignment
from edge_server.cohort import Cohort, Standing
from edge_server.evaluation import Evaluation
from edge_server.rows import AcceptedResult, RoundRow, RunRow, WorkKey
from edge_server.selection import device_seed, random_order


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
        bytes_down: bytes of the model, once for each of them, and once for each turn in a chain.
        seconds: from the first task to the model; evaluation is not counted.
        chains: mediators, 0 without.
        divergence: mean KL divergence of the mediators' labels from uniform, in nats; None without.
        calibrated: whether this is the model that calibration has made after the last round.
        epsilon: ε, for the run's ``delta``, of the device that has had a part in the most models so far;
            None without noise.
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
    chains: int = 0
    divergence: float | None = None
    calibrated: bool = False
    epsilon: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


MOST_LOSS = 1e30
"""Nats of one example: more than a float32 program gives, and sums of it stay finite."""

_R = TypeVar("_R", bound="TrainingRound")


@dataclass(slots=True, kw_only=True)
class TrainingRound(Assignment):
    """An attempt while it is open: every device trains from the round's model."""

    row: RoundRow
    precision: Precision
    total: WeightedSum | RobustMean | NoisySum
    augment: Callable[[str], Augmentation | None] = lambda _: None

    @classmethod
    def open(cls, run: RunRow, bundle: Bundle, cohort: Cohort, *, attempt: int, now: float) -> TrainingRound:
        """Begin an attempt at the round after the run's last with ``cohort``."""
        precision = run.config.precision(cohort.wanted)
        row = round_row(run, cohort.call(), wanted=cohort.wanted, attempt=attempt, precision=precision)
        return cls.of(run, bundle, row, cohort, now=now)

    @classmethod
    def restore(cls, run: RunRow, bundle: Bundle, row: RoundRow, *, now: float) -> TrainingRound:
        """The attempt as the store has it, without its accepted updates: those are added again."""
        asked = math.ceil(row.wanted * run.config.over_selection)
        cohort = Cohort.restored(wanted=row.wanted, asked=asked, selected=row.selected)
        return cls.of(run, bundle, row, cohort, now=now)

    @classmethod
    def of(cls: type[_R], run: RunRow, bundle: Bundle, row: RoundRow, cohort: Cohort, *, now: float) -> _R:
        """The attempt of ``row`` with ``cohort``, nothing of it delivered."""
        precision = run.config.precision(row.wanted)
        return cls(
            key=row,
            row=row,
            cohort=cohort,
            config=run.config,
            bundle=bundle,
            began=now,
            precision=precision,
            total=run.config.make_sum(
                bundle.manifest, precision, wanted=row.wanted, noise_seed=row.noise_seed
            ),
        )

    def details(self, device: str) -> Mapping[str, Any]:
        """How the device trains."""
        config, number = self.config, self.round_of(device)
        optimiser = config.optimiser_of(number)
        return {
            "epochs": config.epochs,
            "batch_size": config.batch_size,
            "lr": to_number(optimiser.lr),
            "weight_decay": to_number(optimiser.weight_decay),
            "momentum": to_number(optimiser.momentum),
            "keep_momentum": config.keep_momentum,
            "proximal": to_number(optimiser.proximal),
            "clip_norm": to_number(optimiser.clip_norm),
            "seed": device_seed(config.seed, number, device, hop=self.hop_of(device)),
            "bounds": dict(self.precision.bounds),
            "exponents": dict(self.precision.exponents),
            "codec": config.codec,
            "compression": config.compression,
            "augmentation": self.augment(device),
        }

    def largest(self) -> int:
        """Bytes that an update may have."""
        return self.bundle.manifest.nbytes + SAFETENSORS_OVERHEAD

    def check(self, device: str, data: bytes, examples: int) -> Mapping[str, Any]:  # noqa: ARG002
        """The update as it counts; TensorError if it is not the model's, not finite, or beyond a bound."""
        parameters, config = self.bundle.manifest.parameters, self.config
        tensors = unpack(data, parameters, config.codec, config.compression, limit=self.largest())
        rules = self.bundle.manifest.rules
        check_update(tensors, rules, self.precision.bounds)
        return bound_norm(tensors, rules, largest=config.max_norm, over=config.over_norm)

    def take(self, result: AcceptedResult, tensors: Mapping[str, Any]) -> None:
        """Add an update to the mean."""
        self.total.add(tensors, result.examples)

    def mean(self) -> MeanUpdate:
        """What the updates come to; ValueError if there are none."""
        return self.total.mean()

    def result(self, evaluation: Evaluation | None, *, model_bytes: int, seconds: float) -> RoundResult:
        """The round's line."""
        return line_of(self, self.row, evaluation, model_bytes=model_bytes, seconds=seconds)


def line_of(
    work: Assignment, row: RoundRow, evaluation: Evaluation | None, *, model_bytes: int, seconds: float
) -> RoundResult:
    """What ``work`` came to."""
    participants = len(work.cohort.accepted)
    return RoundResult(
        round=row.round,
        attempt=row.attempt,
        accuracy=evaluation.accuracy if evaluation else None,
        loss=evaluation.loss if evaluation else None,
        participants=participants,
        examples=work.examples,
        bytes_up=work.bytes_up,
        bytes_down=participants * model_bytes,
        seconds=seconds,
    )


def round_row(
    run: RunRow,
    selected: list[str],
    *,
    wanted: int,
    attempt: int,
    precision: Precision,
    chains: list[list[str]] | None = None,
) -> RoundRow:
    """The row of an attempt that opens now."""
    return RoundRow(
        run=run.id,
        round=run.round + 1,
        attempt=attempt,
        kind="train",
        status="open",
        wanted=wanted,
        selected=selected,
        chains=chains or [],
        exponents=dict(precision.exponents),
        model_before=run.model,
        model_after=None,
        figures=None,
        noise_seed=secrets.token_bytes(32) if run.config.noise_multiplier else None,
    )


@dataclass(slots=True, kw_only=True)
class Assessment(Assignment):
    """An evaluation on the devices' held-out shares, as sums that add up."""

    loss: float = 0.0
    correct: int = 0

    @classmethod
    def open(cls, training: TrainingRound, present: list[str], *, again: bool, now: float) -> Assessment:
        """Ask as many of the devices that are present as a round has.

        Args:
            again: the calibrated model is evaluated, under a key of its own.
        """
        row, config = training.row, training.config
        wanted = config.cohort_size(len(present))
        order = random_order(present, seed=config.seed + 1, round_number=row.round, attempt=row.attempt)
        cohort = Cohort(wanted=wanted, asked=wanted, order=order)
        cohort.call()
        key = WorkKey(row.run, row.round, row.attempt + again, "evaluate")
        return cls(key=key, cohort=cohort, config=config, bundle=training.bundle, began=now)

    def details(self, device: str) -> Mapping[str, Any]:  # noqa: ARG002 - all are asked the same
        """Nothing but the model."""
        return {}

    def report(self, device: str, report: Report) -> None:
        """Add a device's sums, once; ProtocolError if they cannot be true."""
        if self.cohort.standing(device) not in (Standing.ASKED, Standing.TAKEN, Standing.LOST):
            return
        loss = number(report.loss)
        most = MOST_LOSS * report.examples
        if (
            report.correct > report.examples
            or report.examples > self.config.max_examples
            or not 0 <= loss <= most
        ):
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
