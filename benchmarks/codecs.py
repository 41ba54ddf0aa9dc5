"""What codecs save and cost: bytes of an update and accuracy for each, and what the wire adds to the bytes.

Accuracy: federated averaging of scikit-learn's digits over 12 devices (Dirichlet 0.1), in the engine that
gives the bits of a run over MQTT. Overhead: real clients on a real mosquitto behind a proxy that counts what
goes through each socket; the difference of a long and a short run is what a round costs, model down and
update up, over the raw bytes of the tensors.

    python benchmarks/codecs.py [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from edge_export import export_bundle
from edge_sdk import ArrayDataset, Bundle, EdgeClient, Engine
from edge_server import RunConfig, Server
from edge_simulation import MosquittoBroker, dirichlet_hsu, load_train_test, simulate
from edge_simulation.proxy import Proxy

CODECS = (("fp32", "none"), ("fp16", "none"), ("int8", "none"), ("int8", "zstd"), ("fp32", "zstd"))
ROUNDS, LAST = 60, 10
"""Rounds of a run, and how many of its last ones its accuracy is the mean of."""
DEVICES = 12


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed in place of five")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    seeds = range(1 if options.quick else 5)

    runs = {codec: [learn(*codec, seed) for seed in seeds] for codec in CODECS}
    plain_bytes = np.mean([size for _, size in runs["fp32", "none"]])
    plain_accuracy = np.mean([accuracy for accuracy, _ in runs["fp32", "none"]])
    figures: dict[str, float] = {}
    table = Table("codec", "bytes, of fp32's", "accuracy, %", "loss, points")
    for (codec, compression), found in runs.items():
        name = codec if compression == "none" else f"{codec}_{compression}"
        share = float(np.mean([size for _, size in found]) / plain_bytes)
        accuracy = float(np.mean([accuracy for accuracy, _ in found]))
        figures |= {f"bytes.{name}": share, f"accuracy_loss.{name}": float(plain_accuracy) - accuracy}
        table.add_row(name, f"{share:.3f}", f"{accuracy:.2f}", f"{plain_accuracy - accuracy:+.2f}")
    figures |= traffic()
    Console().print(table)
    Console().print({name: round(value, 4) for name, value in figures.items()})
    if options.json:
        budget = f"{len(seeds)} seeds, {DEVICES} devices, 6 a round, {ROUNDS} rounds, 1 local epoch, batch 8"
        document = {"figures": {n: round(v, 4) for n, v in figures.items()}, "budget": budget}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def learn(codec: str, compression: str, seed: int) -> tuple[float, int]:
    """Mean accuracy in % over the last rounds, and the bytes of all updates."""
    digits = load_train_test("digits", seed=seed)
    split = dirichlet_hsu(digits.train.labels, devices=DEVICES, alpha=0.1, seed=seed)
    settings: dict[str, Any] = {"codec": codec, "compression": compression}
    config = RunConfig(fleet="f", rounds=ROUNDS, participants=6, lr=0.05, batch_size=8, seed=seed, **settings)
    shares = {f"d{i:02}": (digits.train, indices) for i, indices in enumerate(split.indices)}
    done = simulate(bundle_of(_learning(seed)), config, shares, eval_data=digits.test)
    accuracies = [100 * line.accuracy for line in done.rounds[-LAST:] if line.accuracy is not None]
    return float(np.mean(accuracies)), sum(line.bytes_up for line in done.rounds)


def traffic() -> dict[str, float]:
    """Bytes at the sockets of a round, over the raw bytes of model down and update up, with 2 and 4 devices.

    ``overhead.fp32`` is at the devices' sockets. ``model_sends`` is how often the server sends the model of a
    round, whatever the number of devices.
    """
    bundle = bundle_of(_of_a_megabyte())
    raw = bundle.manifest.nbytes
    figures: dict[str, float] = {}
    for devices in (2, 4):
        long, short = (_bytes(bundle, devices, rounds) for rounds in (12, 4))
        round_of = {who: (long[who] - short[who]) / 8 for who in long}
        figures["overhead.fp32"] = max(
            figures.get("overhead.fp32", 0.0), round_of["devices"] / (devices * 2 * raw)
        )
        figures[f"model_sends.{devices}_devices"] = round_of["server"] / raw
    return figures


def _bytes(bundle: Bundle, devices: int, rounds: int) -> dict[str, int]:
    """Bytes at the devices' sockets, both ways, and those that the server sends, in one run."""
    rng = np.random.default_rng(0)
    data = ArrayDataset(rng.integers(256, size=(32, 8, 8), dtype=np.uint8), rng.integers(10, size=32))
    config = RunConfig(fleet="f", rounds=rounds, participants=devices, evaluation="none", lr=0.01)
    with (
        tempfile.TemporaryDirectory() as folder,
        MosquittoBroker() as broker,
        Proxy(broker.url) as proxy,
        ThreadPoolExecutor(devices + 1) as pool,
    ):
        server = Server(bundle, config, broker=proxy.url, work_dir=Path(folder) / "server")
        serving = pool.submit(server.run)
        clients = [
            EdgeClient(
                proxy.url,
                fleet="f",
                data=data,
                work_dir=Path(folder) / f"d{number}",
                device_id=f"d{number}",
                engine=Engine(threads=1),
            )
            for number in range(devices)
        ]
        for run in [pool.submit(client.run) for client in clients]:
            run.result(300)
        serving.result(60)
        of_server = [t for t in proxy.traffic if t.client.startswith("edge-server")]
        of_devices = [t for t in proxy.traffic if not t.client.startswith("edge-server")]
    return {
        "devices": sum(t.up + t.down for t in of_devices),
        "server": sum(t.up for t in of_server),
    }


def bundle_of(model: nn.Module) -> Bundle:
    """For 8 x 8 images of ten classes."""
    return export_bundle(model, (1, 8, 8), classes=10)


def _learning(seed: int) -> nn.Module:
    """0.6 MB, with BatchNorm, whose statistics travel as they are."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def _of_a_megabyte() -> nn.Module:
    """1.1 MB, of which the wire is measured."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3700), nn.ReLU(), nn.Linear(3700, 10))


if __name__ == "__main__":
    main()
