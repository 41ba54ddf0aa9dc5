"""The figures and the tables that the results come to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from edge_server.mediators import chains, divergence
from edge_server.selection import select
from edge_simulation.partition import client_imbalanced
from noniid.cells import Result
from noniid.plan import Cell, Plan
from noniid.settings import COLUMNS, DEVICES, DIVERGENCE, SPLITS, STRONG


def column(plan: Plan, data: str, split: str, name: str) -> tuple[Cell, list[Result], bool]:
    """The cell of a column of the table, its results, and whether they are calibrated."""
    cell = Cell(data, split, "fedavgm" if name == "fedavgm_ccvr" else name)
    return cell, plan.of(cell), name in ("fedavgm_ccvr", "full")


def mean_accuracy(results: Iterable[Result], *, calibrated: bool = False) -> float | None:
    values = [result.calibrated if calibrated else result.accuracy for result in results]
    return float(np.mean(values)) if values else None


def figures(plan: Plan) -> dict[str, float | None]:
    """All figures that the results so far allow, in points of per cent where they are accuracies."""
    found: dict[str, float | None] = {}
    for data in plan.budget.steps:
        for split in SPLITS:
            for name in COLUMNS:
                _, results, calibrated = column(plan, data, split, name)
                if results:
                    found[f"accuracy.{data}.{split}.{name}"] = mean_accuracy(results, calibrated=calibrated)
                    found[f"bytes_to_target.{data}.{split}.{name}"] = _bytes_to_target(
                        plan, data, split, name
                    )
        five = [mean_accuracy(plan.of(Cell(data, "alpha0", name, five=True))) for name in STRONG]
        if None not in five:
            found |= {
                f"accuracy.{data}.alpha0.five.{name}": value for name, value in zip(STRONG, five, strict=True)
            }
            found[f"fedavgm_gain.{data}"] = five[1] - five[0]  # type: ignore[operator]
        for figure, better, worse in (
            ("astraea_gain", "longtail.astraea", "longtail.fedavg"),
            ("gap_to_iid", "iid.fedavg", "alpha0_1.full"),
        ):
            pair = [found.get(f"accuracy.{data}.{cell}") for cell in (better, worse)]
            if None not in pair:
                found[f"{figure}.{data}"] = pair[0] - pair[1]  # type: ignore[operator]
    return found | _calibration(plan) | divergences()


def _calibration(plan: Plan) -> dict[str, float | None]:
    """CCVR where it gains most, and what the same calibration on all real features gains there."""
    gains = [
        (
            np.mean([r.calibrated - r.last for r in results]),
            np.mean([r.oracle - r.calibrated for r in results]),
        )
        for cell in plan.cells
        if (results := [result for result in plan.of(cell) if not result.failed])
    ]
    if not gains:
        return {}
    best, gap = max(gains)
    return {"ccvr_gain.best": float(best), "ccvr_oracle_gap": float(gap)}


def _bytes_to_target(plan: Plan, data: str, split: str, name: str) -> float | None:
    """Bytes until FedAvg's best accuracy is reached, over FedAvg's; None if it is not, for any seed."""
    baseline = {r.run.seed: r for r in plan.of(Cell(data, split, "fedavg")) if r.curve}
    _, results, calibrated = column(plan, data, split, name)
    ratios = []
    for result in results:
        if result.run.seed not in baseline:
            continue
        _, needed, target = max(baseline[result.run.seed].curve, key=lambda point: point[2])
        reached = [total for _, total, accuracy in result.curve if accuracy >= target]
        if calibrated and result.calibrated >= target:
            reached.append(result.curve[-1][1] + result.bytes_statistics)
        if not reached:
            return None
        ratios.append(min(reached) / needed)
    return float(np.mean(ratios)) if ratios else None


def divergences(rounds: int = 50) -> dict[str, float]:
    """Mean KL divergence to uniform of devices, and of mediators of γ = 10 over 50 of them a round."""
    labels = np.arange(50_000) % 10
    fleet = client_imbalanced(labels, devices=DEVICES, seed=0, divergence=DIVERGENCE)
    histograms = {f"d{i:03}": row for i, row in enumerate(fleet.histogram(labels, 10))}
    after = []
    for number in range(1, rounds + 1):
        cohort = select(
            histograms, wanted=50, over_selection=1, groups={}, seed=0, round_number=number, attempt=0
        )
        asked = {device: histograms[device] for device in cohort.call()}
        after += [
            divergence(np.sum([asked[device] for device in chain], axis=0))
            for chain in chains(asked, longest=10)
        ]
    before = [divergence(counts) for counts in histograms.values()]
    return {"kld_start": float(np.mean(before)), "kld_after": float(np.mean(after))}


def markdown(plan: Plan, found: dict[str, float | None]) -> str:
    """The tables of the README."""
    blocks = []
    for data in plan.budget.steps:
        rows = []
        for split in SPLITS:
            values = []
            for name in COLUMNS:
                cell, _, _ = column(plan, data, split, name)
                value = found.get(f"accuracy.{data}.{split}.{name}")
                open_ = "" if plan.is_done(cell) else " …"
                values.append("" if value is None else f"{value:.1f}{open_}")
            if any(values):
                rows.append([split, *values])
        five = [found.get(f"accuracy.{data}.alpha0.five.{name}") for name in COLUMNS]
        if any(five):
            rows.append(
                ["alpha0, five a round", *("" if value is None else f"{value:.1f}" for value in five)]
            )
        if rows:
            blocks.append(_rows([f"{data}, test accuracy in %", *COLUMNS], rows))
    named = [
        [name, "not reached" if value is None else f"{value:.3g}"]
        for name, value in found.items()
        if not name.startswith(("accuracy", "bytes_to_target"))
    ]
    return "\n\n".join([*blocks, _rows(["figure", "value"], named)])


def details(plan: Plan) -> dict[str, Any]:
    """Of every cell its rate, rounds, steps, megabytes and curve."""
    return {
        cell.name: {
            "done": plan.is_done(cell),
            "lr": results[0].run.settings["lr"],
            "tried": plan.tried(cell),
            "rounds": results[0].rounds,
            "steps": results[0].steps,
            "seeds": [
                {"accuracy": r.accuracy, "last": r.last, "calibrated": r.calibrated, "oracle": r.oracle,
                 "oracle_50th": r.oracle_50th, "bytes_statistics": r.bytes_statistics, "failed": r.failed}
                for r in results
            ],
            "curve": [(number, total, round(value, 2)) for number, total, value in results[0].curve],
        }
        for cell in plan.cells
        if (results := plan.of(cell))
    }  # fmt: skip


def _rows(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
