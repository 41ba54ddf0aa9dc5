"""What noise costs on the digits: accuracy for ε, the balance of chains, and calibration.

    python benchmarks/privacy.py [--json FILE]

Three tables, all by the engine or by the functions that devices and the server use; a minute in all. ε is
for δ = 1e-5 of the device that was in the most rounds, here all of them. The model is one layer, 650
weights: the more weights, the more noise for the same ε. The simulated noise comes from the run's seed,
that of histograms and statistics from the operating system, so that those two tables vary a little.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from edge_export import export_bundle
from edge_sdk.bundle import Bundle
from edge_sdk.data import ArrayDataset, prepare
from edge_sdk.description import Sharing
from edge_sdk.runtime import open_runtime
from edge_sdk.statistics import class_statistics
from edge_server.calibration import Settings, calibrate
from edge_server.config import make_config
from edge_server.evaluation import Evaluator
from edge_server.mediators import chains, divergence
from edge_server.privacy import epsilon
from edge_simulation import simulate
from edge_simulation.datasets import TrainTest, load_train_test
from edge_simulation.partition import dirichlet_hsu

ROUNDS = 10
DELTA = 1e-5
MULTIPLIERS = (0.0, 0.3, 0.6, 1.0, 3.0)
MEAN, STD = (0.3,), (0.35,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    data = load_train_test("digits", None, 0)
    figures: dict[str, float] = {}
    updates(data, figures)
    histograms(data, figures)
    statistics(data, figures)
    if options.json is not None:
        options.json.write_text(json.dumps({"figures": figures}, indent=2) + "\n", encoding="utf-8")


def updates(data: TrainTest, figures: dict[str, float]) -> None:
    """Central noise: accuracy after ten rounds of all devices, each with like data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    bundle = export_bundle(model, (1, 8, 8), classes=10, mean=MEAN, std=STD)
    print(f"updates: accuracy after {ROUNDS} rounds, max_norm 0.5, mean of three seeds")
    print("| z | ε | 12 devices | 120 devices |\n| --- | --- | --- | --- |")
    for multiplier in MULTIPLIERS:
        spent = epsilon(multiplier, ROUNDS, delta=DELTA) if multiplier else np.inf
        found = {devices: _accuracy(bundle, data, devices, multiplier) for devices in (12, 120)}
        cells = " | ".join(f"{100 * accuracy:.1f} %" for accuracy in found.values())
        print(f"| {multiplier:g} | {spent:.0f} | {cells} |", flush=True)
        for devices, accuracy in found.items():
            figures[f"accuracy.{devices}.z{multiplier:g}"] = accuracy


def _accuracy(bundle: Bundle, data: TrainTest, devices: int, multiplier: float) -> float:
    found = []
    for seed in range(3):
        config = make_config(
            {
                "fleet": "digits",
                "rounds": ROUNDS,
                "participants": devices,
                "lr": 0.1,
                "epochs": 5,
                "batch_size": 10,
                "max_norm": 0.5,
                "over_norm": "clip",
                "noise_multiplier": multiplier,
                "delta": DELTA,
                "seed": seed,
            }
        )
        run = simulate(
            bundle, config, _shares(data, devices, alpha=100.0), eval_data=data.test, evaluate_every=ROUNDS
        )
        assert run.evaluation is not None
        found.append(run.evaluation.accuracy)
    return float(np.mean(found))


def _shares(data: TrainTest, devices: int, *, alpha: float) -> dict[str, ArrayDataset]:
    share = len(data.train) // devices
    partition = dirichlet_hsu(data.train.labels, devices=devices, alpha=alpha, seed=0, share=share)
    return {f"d{n:03d}": data.train.take(indices) for n, indices in enumerate(partition.indices)}


def histograms(data: TrainTest, figures: dict[str, float]) -> None:
    """Noise on the devices: chains are planned by noisy counts and judged by the true ones."""
    true = {
        device: np.bincount(share.labels, minlength=10)
        for device, share in _shares(data, 12, alpha=0.1).items()
    }
    print("\nhistograms: mean KL divergence of three chains of four from uniform, in nats")
    print("| ε | divergence |\n| --- | --- |")
    for eps in (np.inf, 1.0, 0.3, 0.1, 0.03):
        draws = []
        for _ in range(1 if eps == np.inf else 200):
            told = true if eps == np.inf else {d: _told(counts, eps) for d, counts in true.items()}
            placed = chains(told, longest=4)
            draws.append(np.mean([divergence(sum(true[device] for device in chain)) for chain in placed]))
        figures[f"divergence.eps{eps:g}"] = float(np.mean(draws))
        print(f"| {eps:g} | {np.mean(draws):.3f} |", flush=True)
    rng = np.random.default_rng(0)
    order = [list(rng.permutation(list(true))) for _ in range(200)]
    at_random = [
        np.mean([divergence(sum(true[device] for device in ids[n : n + 4])) for n in (0, 4, 8)])
        for ids in order
    ]
    figures["divergence.random"] = float(np.mean(at_random))
    print(f"| chains at random | {np.mean(at_random):.3f} |")


def _told(counts: np.ndarray, eps: float) -> np.ndarray:
    return Sharing(histogram=True, histogram_epsilon=eps, withhold_below=0).hidden(counts)


def statistics(data: TrainTest, figures: dict[str, float]) -> None:
    """Noise on the devices: accuracy of a classifier that is calibrated by noisy statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    bundle = export_bundle(model, (1, 8, 8), classes=10, mean=MEAN, std=STD)
    config = make_config(
        {"fleet": "digits", "rounds": ROUNDS, "participants": 12, "lr": 0.1, "epochs": 2, "batch_size": 10}
    )
    devices = _shares(data, 12, alpha=0.1)
    weights = simulate(bundle, config, devices).weights
    runtime, evaluator = open_runtime(bundle, threads=1), Evaluator(bundle, data.test)
    runtime.set_weights(weights)
    x, _ = prepare(data.train, np.arange(len(data.train)), bundle.manifest.input, 10)
    norm = float(np.median(np.linalg.norm(runtime.embed(x), axis=1)))
    print(f"\nstatistics: accuracy after CCVR, 24 features clipped to {norm:.1f}, their median norm")
    print("| z | ε | full | diagonal |\n| --- | --- | --- | --- |")
    print(f"| not calibrated | | {_percent(evaluator.evaluate(weights).accuracy)} | |")
    settings = Settings(per_class=200, epochs=10, lr=0.05, seed=0)
    for multiplier in (0.0, 0.3, 1.0, 3.0):
        cells = []
        sharing = Sharing(statistics_noise=multiplier, feature_norm=norm if multiplier else 0.0)
        for covariance in ("full", "diagonal"):
            found = []
            for _ in range(5 if multiplier else 1):
                reports = [
                    class_statistics(
                        runtime,
                        bundle.manifest,
                        share,
                        np.arange(len(share)),
                        covariance=covariance,
                        withhold_below=5,
                        noise=sharing.feature_noise(),
                    )
                    for share in devices.values()
                ]
                tuned = calibrate(weights, bundle.manifest, reports, covariance=covariance, settings=settings)
                found.append(evaluator.evaluate(tuned).accuracy)
            accuracy = float(np.mean(found))
            figures[f"calibrated.{covariance}.z{multiplier:g}"] = accuracy
            cells.append(_percent(accuracy))
        spent = epsilon(multiplier, 1, delta=DELTA) if multiplier else np.inf
        print(f"| {multiplier:g} | {spent:.1f} | {' | '.join(cells)} |", flush=True)


def _percent(accuracy: float) -> str:
    return f"{100 * accuracy:.1f} %"


if __name__ == "__main__":
    main()
