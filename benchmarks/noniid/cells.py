"""One run of the table: its devices, its training, and what is measured of it."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.data import ArrayDataset
from edge_sdk.features import open_describer
from edge_sdk.files import write_atomically
from edge_sdk.runtime import open_runtime
from edge_sdk.tensors import Array, encode, sha256
from edge_server import RunConfig
from edge_server.calibration import calibrate_on, real_features
from edge_server.evaluation import Evaluator
from edge_server.mediators import multiples
from edge_simulation.datasets import TrainTest
from edge_simulation.engine import Simulated, calibration_of, simulate
from edge_simulation.partition import (
    Partition,
    client_imbalanced,
    dirichlet_hsu,
    dirichlet_per_class,
    iid,
    long_tail,
)
from edge_simulation.simulated_round import DivergedError
from noniid.models import bundle_path, load
from noniid.settings import ALPHAS, DESCRIBED, DIVERGENCE, TAIL, Run

POINTS = 40
"""Evaluations in a run."""
TAIL_OF_RUN = 0.9
"""An accuracy is the mean over the models evaluated after this share of the rounds: one round's model may
be ten points off where each device has one class."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to; accuracies in per cent.

    Attributes:
        curve: (round, bytes up and down so far, accuracy) of every evaluated model.
        accuracy: mean over the run's last tenth.
        last: of the last model; ``calibrated`` and, on real features, ``oracle`` and ``oracle_50th``.
        bytes_statistics: what calibration costs beside.
        failed: why the run ended early, which counts as chance.
    """

    key: str
    run: Run
    rounds: int
    steps: int
    curve: list[tuple[int, int, float]]
    accuracy: float
    last: float
    calibrated: float
    oracle: float
    oracle_50th: float
    bytes_statistics: int
    seconds: float
    failed: str = ""


def key_of(run: Run) -> str:
    """By which the cache finds a run."""
    return sha256(msgspec.json.encode(run, order="sorted"))[:16]


def perform(run: Run, cache: Path, data_dir: Path | None) -> Result:
    """Do ``run``, or go on with it where it was stopped."""
    began = time.perf_counter()
    data = _load(run.data, data_dir)
    partition = partition_of(run, data.train.labels)
    shares = {f"d{i:03}": (data.train, indices) for i, indices in enumerate(partition.indices)}
    settings = {"rounds": _rounds(run, partition, data), **run.settings}
    config = RunConfig(fleet="noniid", seed=run.seed, **{"calibration": "ccvr", **settings})
    bundle = Bundle.read(bundle_path(cache, run.model, run.data))
    every = max(config.rounds // POINTS, 1)
    grouped = config.selection == "grouped"
    # A version that has other settings begins anew.
    version = sha256(msgspec.json.encode([config, bundle.sha256]))
    checkpoint = cache / f"{key_of(run)}-{version[:8]}.run"
    try:
        simulated = simulate(
            bundle,
            config,
            shares,
            eval_data=data.test,
            evaluate_every=every,
            descriptors=_descriptors(run, partition, data, cache) if grouped else None,
            checkpoint=checkpoint,
            save_every=10 * every,
            max_steps=2 * run.steps or None,
        )
    except DivergedError as error:
        checkpoint.unlink(missing_ok=True)
        return _failed(run, config.rounds, str(error), time.perf_counter() - began, data.classes)
    if len(simulated.rounds) < config.rounds:
        checkpoint.unlink(missing_ok=True)
        why = f"devices diverged so often that {len(simulated.rounds)} rounds took twice the budget"
        return _failed(run, config.rounds, why, time.perf_counter() - began, data.classes)
    result = _measured(run, bundle, config, simulated, shares, data, time.perf_counter() - began)
    checkpoint.unlink(missing_ok=True)
    return result


def partition_of(run: Run, labels: Array) -> Partition:
    """The run's devices. Two papers' α: ``alpha…`` are Hsu's, ``per_class…`` those of CCVR's experiments."""
    if run.split == "iid":
        return iid(labels, devices=run.devices, seed=run.seed)
    if run.split == "longtail":
        tail = long_tail(labels, ratio=TAIL, seed=run.seed)
        fleet = client_imbalanced(labels[tail], devices=run.devices, seed=run.seed, divergence=DIVERGENCE)
        return fleet.within(tail)
    if run.split.startswith("per_class"):
        alpha = float(run.split.removeprefix("per_class"))
        return dirichlet_per_class(labels, devices=run.devices, alpha=alpha, seed=run.seed)
    return dirichlet_hsu(labels, devices=run.devices, alpha=ALPHAS[run.split], seed=run.seed)


def _rounds(run: Run, partition: Partition, data: TrainTest) -> int:
    """So many that the budget of local steps is used up: fewer where devices train on copies too."""
    if not run.steps:
        return 1
    config = RunConfig(fleet="noniid", rounds=1, **run.settings)
    histograms = partition.histogram(data.train.labels, data.classes)
    factors = np.ones(data.classes)
    for label, multiple in multiples(histograms.sum(axis=0), config.augmentation).items():
        factors[label] = multiple
    steps = float(np.ceil(histograms @ factors / config.batch_size).mean()) * config.epochs
    per_round = steps * config.cohort_size(run.devices) * (config.chain_passes if config.chain else 1)
    return max(round(run.steps / per_round), 1)


def _measured(
    run: Run,
    bundle: Bundle,
    config: RunConfig,
    simulated: Simulated,
    shares: dict[str, tuple[ArrayDataset, Array]],
    data: TrainTest,
    seconds: float,
) -> Result:
    moved = np.cumsum([line.bytes_up + line.bytes_down for line in simulated.rounds])
    moved += simulated.bytes_described
    curve = [
        (line.round, int(total), 100 * line.accuracy)
        for line, total in zip(simulated.rounds, moved, strict=True)
        if line.accuracy is not None
    ]
    assert simulated.evaluation is not None
    everything = data.train.take(np.concatenate([indices for _, indices in shares.values()]))
    runtime = open_runtime(bundle, threads=1)
    runtime.set_weights(simulated.trained)
    evaluator = Evaluator(bundle, data.test, threads=1)

    def calibrated_on(fraction: float) -> float:
        features, labels = real_features(
            runtime, bundle.manifest, everything, fraction=fraction, seed=run.seed
        )
        weights = calibrate_on(simulated.trained, bundle.manifest, features, labels, calibration_of(config))
        return 100 * evaluator.evaluate(weights).accuracy

    return Result(
        key=key_of(run),
        run=run,
        rounds=config.rounds,
        steps=simulated.steps,
        curve=curve,
        accuracy=float(
            np.mean([value for number, _, value in curve if number >= TAIL_OF_RUN * config.rounds])
        ),
        last=curve[-1][2],
        calibrated=100 * simulated.evaluation.accuracy,
        oracle=calibrated_on(1.0),
        oracle_50th=calibrated_on(1 / 50),
        bytes_statistics=simulated.bytes_statistics,
        seconds=seconds,
    )


def _failed(run: Run, rounds: int, why: str, seconds: float, classes: int) -> Result:
    chance = 100 / classes
    return Result(
        key=key_of(run),
        run=run,
        rounds=rounds,
        steps=0,
        curve=[],
        accuracy=chance,
        last=chance,
        calibrated=chance,
        oracle=chance,
        oracle_50th=chance,
        bytes_statistics=0,
        seconds=seconds,
        failed=why,
    )


def _descriptors(run: Run, partition: Partition, data: TrainTest, cache: Path) -> dict[str, Array]:
    """Hashes of the devices' mean features over their first images; they are the same in every run."""
    path = cache / f"descriptors-{run.data}-{run.split}-{run.devices}-{run.seed}.safetensors"
    if not path.exists():
        describer = open_describer(Bundle.read(bundle_path(cache, "describer", run.data)), threads=1)
        rng = np.random.default_rng(run.seed)
        hashes = [
            describer.descriptor(data.train, rng.permutation(indices)[:DESCRIBED])
            for indices in partition.indices
        ]
        write_atomically(path, encode({f"d{i:03}": made for i, made in enumerate(hashes)}))
    from safetensors.numpy import load_file

    return dict(load_file(path))


@lru_cache
def _load(data: str, data_dir: Path | None) -> TrainTest:
    return load(data, data_dir)
