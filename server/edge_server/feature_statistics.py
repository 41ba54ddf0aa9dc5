"""The devices' class statistics at the end of a run, and the calibration that they lead to (CCVR)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edge_sdk.bundle import Bundle
from edge_sdk.statistics import check_statistics, statistics_specs
from edge_sdk.tensors import Tensors, TensorSpec, decode
from edge_sdk.work import SAFETENSORS_OVERHEAD
from edge_server.assignment import Assignment
from edge_server.cohort import Cohort
from edge_server.config import RunConfig
from edge_server.evaluation import Evaluation
from edge_server.rounds import RoundResult, line_of
from edge_server.rows import AcceptedResult, RoundRow, RunRow
from edge_server.store import Store


@dataclass(slots=True, kw_only=True)
class FeatureStatistics(Assignment):
    """All devices are asked for statistics of their features by the run's last model."""

    row: RoundRow

    @classmethod
    def of(cls, run: RunRow, bundle: Bundle, present: list[str], *, now: float) -> FeatureStatistics:
        """Ask all devices that are present."""
        cohort = Cohort(wanted=len(present), asked=len(present), order=present)
        row = RoundRow(
            run=run.id,
            round=run.round,
            attempt=0,
            kind="statistics",
            status="open",
            wanted=len(present),
            selected=cohort.call(),
            chains=[],
            exponents={},
            model_before=run.model,
            model_after=None,
            figures=None,
        )
        return cls._of(run, bundle, row, cohort, now=now)

    @classmethod
    def restore(cls, run: RunRow, bundle: Bundle, row: RoundRow, *, now: float) -> FeatureStatistics:
        """As the store has it, without the accepted statistics."""
        cohort = Cohort.restored(wanted=row.wanted, asked=row.wanted, selected=row.selected)
        return cls._of(run, bundle, row, cohort, now=now)

    @classmethod
    def _of(
        cls, run: RunRow, bundle: Bundle, row: RoundRow, cohort: Cohort, *, now: float
    ) -> FeatureStatistics:
        return cls(key=row, row=row, cohort=cohort, config=run.config, bundle=bundle, began=now)

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors that a device sends."""
        manifest, config = self.bundle.manifest, self.config
        return statistics_specs(
            manifest.classes, manifest.feature_size, config.covariance, config.covariance_rank
        )

    def details(self, device: str) -> Mapping[str, Any]:  # noqa: ARG002 - all are asked the same
        """How much of the covariance is wanted."""
        return {"covariance": self.config.covariance, "rank": self.config.covariance_rank}

    def largest(self) -> int:
        """Bytes that statistics may have."""
        return sum(spec.nbytes for spec in self.specs) + SAFETENSORS_OVERHEAD

    def check(self, device: str, data: bytes, examples: int) -> Mapping[str, Any]:  # noqa: ARG002
        """The statistics' tensors; TensorError if they cannot be true."""
        tensors = decode(data, self.specs)
        check_statistics(tensors, max_examples=examples)
        return tensors

    def take(self, result: AcceptedResult, tensors: Mapping[str, Any]) -> None:
        """Nothing to do: they are read from the store once all are there, one device at a time."""

    def result(self, evaluation: Evaluation | None, *, model_bytes: int, seconds: float) -> RoundResult:
        """The line of the calibrated model."""
        line = line_of(self, self.row, evaluation, model_bytes=model_bytes, seconds=seconds)
        return replace(line, calibrated=True)


def calibrated(store: Store, row: RoundRow, bundle: Bundle, weights: Tensors, config: RunConfig) -> Tensors:
    """The weights with the classifier that the accepted statistics of ``row`` lead to.

    Raises:
        RunError: no device told of any class.
    """
    from edge_server.calibration import Settings, calibrate

    manifest = bundle.manifest
    specs = statistics_specs(
        manifest.classes, manifest.feature_size, config.covariance, config.covariance_rank
    )
    reports = (decode(store.blob(result.hash), specs) for result in store.results(row))
    settings = Settings(
        per_class=config.virtual_features,
        balance=config.virtual_balance,
        epochs=config.calibration_epochs,
        lr=config.calibration_lr,
        seed=config.seed,
    )
    return calibrate(weights, manifest, reports, covariance=config.covariance, settings=settings)
