"""A run in one process: no broker and no deadlines, the very pieces that the coordinator is made of.

With the same settings, devices and data it gives the bits of a run over MQTT in which no device fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.data import Dataset
from edge_sdk.errors import RunError
from edge_sdk.tensors import Array, Tensors, encode
from edge_server.calibration import Settings, calibrate
from edge_server.config import RunConfig
from edge_server.evaluation import Evaluation, Evaluator
from edge_server.grouping import group
from edge_server.mediators import multiples
from edge_server.privacy import Spent, check_noise
from edge_server.rounds import RoundResult
from edge_simulation.checkpoint import Checkpoint
from edge_simulation.devices import Devices, Share
from edge_simulation.simulated_round import SimulatedRound, Told


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """What a simulation came to.

    Attributes:
        weights: of the last model, calibrated where the run says so.
        trained: of the model before calibration.
        rounds: a line for each round, its seconds those of this process.
        evaluation: of ``weights``; None without evaluation data.
        steps: local steps of all devices together.
        bytes_described: what the devices told of their data before the first round.
        bytes_statistics: what they told of their features for calibration.
    """

    weights: Tensors
    trained: Tensors
    rounds: tuple[RoundResult, ...]
    evaluation: Evaluation | None
    steps: int
    bytes_described: int
    bytes_statistics: int


def simulate(
    bundle: Bundle,
    config: RunConfig,
    devices: Mapping[str, Share],
    *,
    eval_data: Dataset | None = None,
    evaluate_every: int = 1,
    threads: int = 1,
    withhold_below: int = 0,
    descriptors: Mapping[str, Array] | None = None,
    checkpoint: Path | None = None,
    save_every: int = 50,
    max_steps: int | None = None,
    on_round: Callable[[RoundResult], None] | None = None,
) -> Simulated:
    """Run ``config`` over ``devices`` to its last round.

    Use it to compare strategies: a round costs its local steps and little else. All devices are there all
    the time; one whose training diverges is replaced, or skipped in its chain. Settings of the wire
    (deadlines, sizes of chunks) have no effect, and evaluation is on ``eval_data`` whatever they say.

    Args:
        bundle: what is trained.
        config: the run's settings.
        devices: each device's data by its id.
        eval_data: labelled data to evaluate models on.
        evaluate_every: rounds from one evaluation to the next; the last model is always evaluated.
        threads: of the runtime.
        withhold_below: classes of which a device has fewer examples are not told of.
        descriptors: for ``grouped`` selection, by device, where they are known already.
        checkpoint: a file from which the same call goes on with a run that was stopped.
        save_every: rounds from one save to the next.
        max_steps: local steps of all devices, after which the run ends early. What a device does before it
            diverges counts, so that rounds of replacements do not go on for ever.
        on_round: called with every round's line.

    Raises:
        DataError: no device, one without data, or data that does not fit the model.
        RunError: settings that contradict one another, or a checkpoint of another run.
        DivergedError: a RunError: training stayed finite on too few devices of a round.
    """
    config.check()
    if config.mode != "rounds":
        raise RunError("the engine's devices are all of one speed: run the buffered mode over a broker")
    if config.noise_multiplier:
        check_noise(bundle.manifest)
    fleet = Devices(
        bundle=bundle, config=config, shares=devices, threads=threads, withhold_below=withhold_below
    )
    evaluator = Evaluator(bundle, eval_data, threads=threads) if eval_data is not None else None
    told, bytes_described = _describe(fleet, descriptors)

    strategy = config.make_strategy()
    state, lines = strategy.init(bundle.weights, bundle.manifest.rules), list[RoundResult]()
    spent = Spent(config.noise_multiplier, config.delta)
    saved = Checkpoint(checkpoint, fleet) if checkpoint is not None else None
    if saved is not None and (found := saved.load(strategy)) is not None:
        state, lines = found
    for number in range(len(lines) + 1, config.rounds + 1):
        if max_steps is not None and fleet.steps >= max_steps:
            break
        began = time.perf_counter()
        one = SimulatedRound(fleet, told, number, state.weights, spent)
        state = strategy.apply(state, one.mean())
        seconds = time.perf_counter() - began
        wanted = evaluator is not None and (number % evaluate_every == 0 or number == config.rounds)
        lines.append(one.result(evaluator.evaluate(state.weights) if wanted and evaluator else None, seconds))
        if saved is not None and (number % save_every == 0 or number == config.rounds):
            saved.save(state, lines)
        if on_round is not None:
            on_round(lines[-1])

    weights, reports = state.weights, list[Tensors]()
    if config.calibration == "ccvr":
        reports = fleet.statistics(weights)
        weights = calibrate(
            weights, bundle.manifest, reports, covariance=config.covariance, settings=calibration_of(config)
        )
    return Simulated(
        weights=weights,
        trained=state.weights,
        rounds=tuple(lines),
        evaluation=evaluator.evaluate(weights) if evaluator is not None else None,
        steps=fleet.steps,
        bytes_described=bytes_described,
        bytes_statistics=sum(len(encode(report)) for report in reports),
    )


def calibration_of(config: RunConfig) -> Settings:
    """The calibration that the run's settings ask for."""
    return Settings(
        per_class=config.virtual_features,
        balance=config.virtual_balance,
        epochs=config.calibration_epochs,
        lr=config.calibration_lr,
        seed=config.seed,
    )


def _describe(fleet: Devices, descriptors: Mapping[str, Array] | None) -> tuple[Told, int]:
    """Describe the data, plan and do the augmentation, form the groups; and the bytes that it took."""
    config, facts = fleet.config, fleet.config.facts()
    groups: dict[str, int] = {}
    histograms: dict[str, Array] = {}
    told: dict[str, Tensors] = {device: {} for device in fleet.ids}
    times = 1
    if "histogram" in facts:
        histograms = fleet.histograms()
        total = np.sum(list(histograms.values()), axis=0)
        if config.augmentation and (plan := multiples(total, config.augmentation)):
            fleet.augment(plan)
            # Told again, because labels are counted as training sees them.
            histograms, times = fleet.histograms(), 2
        for device, counts in histograms.items():
            told[device]["histogram"] = counts
    if config.selection == "grouped":
        found = fleet.descriptors() if descriptors is None else descriptors
        for device in fleet.ids:
            told[device][config.descriptor] = found[device]
        groups = group(found, groups=config.cohort_size(len(fleet.ids)), seed=config.seed)
    return Told(groups, histograms), times * sum(len(encode(facts)) for facts in told.values() if facts)
