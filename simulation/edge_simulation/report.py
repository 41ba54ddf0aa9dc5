"""What came of a simulation, as one HTML file that needs nothing else and as a summary for programs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.files import write_atomically
from edge_sdk.tensors import Array
from edge_server import RoundResult
from edge_simulation.charts import Line, line_chart, stacked_bars

MAX_TABLE_CLASSES = 30


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """One run under one strategy.

    ``confusion`` is int ``[classes, classes]``: rows are true classes, columns what the final model says.
    """

    label: str
    settings: dict[str, str]
    rounds: tuple[RoundResult, ...]
    confusion: Array

    @property
    def final_accuracy(self) -> float:
        """Accuracy after the last round, NaN without rounds."""
        return _or_nan(self.rounds[-1].accuracy) if self.rounds else math.nan

    @property
    def bytes_total(self) -> int:
        """Bytes up and down over all rounds."""
        return sum(each.bytes_up + each.bytes_down for each in self.rounds)

    @property
    def seconds(self) -> float:
        """Wall time of all rounds."""
        return sum(each.seconds for each in self.rounds)


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Runs over one partition of one data set.

    ``alpha`` is the concentration of the Dirichlet partition (inf: IID), ``histogram`` int
    ``[devices, classes]`` the examples that each device holds.

    Raises:
        DataError: names, histogram or a confusion matrix that do not fit each other.
    """

    title: str
    data_name: str
    devices: int
    alpha: float
    seed: int
    class_names: tuple[str, ...]
    histogram: Array
    runs: tuple[RunResult, ...]
    device_names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        classes = self.classes
        if self.histogram.shape != (self.devices, classes):
            raise DataError(
                f"histogram is {list(self.histogram.shape)}, expected [{self.devices}, {classes}]"
            )
        if self.device_names and len(self.device_names) != self.devices:
            raise DataError(f"{len(self.device_names)} device names for {self.devices} devices")
        for run in self.runs:
            if run.confusion.shape != (classes, classes):
                raise DataError(
                    f"the confusion matrix of {run.label} is {list(run.confusion.shape)}, "
                    f"expected [{classes}, {classes}]"
                )

    @property
    def classes(self) -> int:
        """Count of classes."""
        return len(self.class_names)


def _or_nan(figure: float | None) -> float:
    return math.nan if figure is None else figure


def summary(report: Report) -> dict[str, Any]:
    """The figures of a report, ready for JSON; runs by their label in lower case, NaN as None."""
    return {
        "seed": report.seed,
        "runs": {
            run.label.lower(): {
                "rounds": [
                    {
                        "round": each.round,
                        "accuracy": each.accuracy,
                        "loss": each.loss,
                        "participants": each.participants,
                        "bytes_up": each.bytes_up,
                        "bytes_down": each.bytes_down,
                        "seconds": each.seconds,
                    }
                    for each in run.rounds
                ],
                "final_accuracy": _finite(run.final_accuracy),
            }
            for run in report.runs
        },
    }


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    """Write the report as one HTML file that loads nothing; the same report gives the same bytes.

    Raises:
        DataError: Jinja is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise DataError("the report needs Jinja: pip install 'edge-sdk-fl[simulation]'") from None
    environment = Environment(
        loader=PackageLoader("edge_simulation"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=_percent, size=_size, duration=_duration, decimal=_decimal)
    text = environment.get_template("report.html").render(
        report=report,
        charts=_charts(report),
        gain=_gain(report),
        partition="IID" if math.isinf(report.alpha) else f"Dirichlet α = {report.alpha:g}",
        examples=int(report.histogram.sum()),
        rounds=max((len(run.rounds) for run in report.runs), default=0),
        settings=_settings(report),
        shades=[_shades(run.confusion) for run in report.runs],
        max_table_classes=MAX_TABLE_CLASSES,
    )
    write_atomically(Path(path), text.encode())


def _charts(report: Report) -> dict[str, str]:
    by_round, loss, by_bytes = [], [], []
    for run in report.runs:
        moved = np.cumsum([each.bytes_up + each.bytes_down for each in run.rounds]) / 1e6
        by_round.append(Line(run.label, [(each.round, _or_nan(each.accuracy)) for each in run.rounds]))
        loss.append(Line(run.label, [(each.round, _or_nan(each.loss)) for each in run.rounds]))
        by_bytes.append(
            Line(
                run.label, [(x, _or_nan(e.accuracy)) for x, e in zip(moved.tolist(), run.rounds, strict=True)]
            )
        )
    accuracy = "Test accuracy, %"
    return {
        "rounds": line_chart(
            by_round, title="Accuracy by round", x_label="Round", y_label=accuracy, percent=True
        ),
        "loss": line_chart(loss, title="Loss by round", x_label="Round", y_label="Test loss, nats"),
        "bytes": line_chart(
            by_bytes,
            title="Accuracy by traffic",
            x_label="MB moved, all devices, both ways",
            y_label=accuracy,
            percent=True,
        ),
        "labels": stacked_bars(
            report.histogram,
            report.class_names,
            title="Examples of each class on each device",
            device_names=report.device_names,
        ),
    }


def _gain(report: Report) -> float | None:
    """Percentage points by which the last run's accuracy is above the first's."""
    if len(report.runs) < 2:
        return None
    gain = 100 * (report.runs[-1].final_accuracy - report.runs[0].final_accuracy)
    return gain if math.isfinite(gain) else None


def _settings(report: Report) -> list[tuple[str, list[str]]]:
    """Each setting's name with its value in every run."""
    names = dict.fromkeys(name for run in report.runs for name in run.settings)
    return [(name, [run.settings.get(name, "–") for run in report.runs]) for name in names]


def _shades(confusion: Array) -> list[list[int]]:
    """Each cell's part of its row in per cent: how dark it is drawn."""
    rows = np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    shades: list[list[int]] = np.rint(100 * confusion / rows).astype(int).tolist()
    return shades


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _percent(value: float | None) -> str:
    return f"{100 * value:.1f}" if value is not None and math.isfinite(value) else "–"


def _decimal(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else "–"


def _size(value: int) -> str:
    amount = float(value)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.1f} GB"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds // 60)} min {int(seconds % 60)} s"
