"""The README's examples, run as they stand; only the broker's address is another."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from edge_sdk import Bundle
from edge_sdk.data import save_npz
from edge_server.config import make_config, read_toml
from edge_simulation import MosquittoBroker, load_train_test

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
MODEL = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folders(tmp_path):
    """One for the server with test data, two for devices with a share each."""
    digits = load_train_test("digits")
    places = [tmp_path / name for name in ("server", "first", "second")]
    for place in places:
        place.mkdir()
    save_npz(places[0] / "test.npz", digits.test)
    for i, place in enumerate(places[1:]):
        save_npz(place / "mine.npz", digits.train.take(range(100 * i, 100 * i + 100)))
    return places


def test_the_python_examples_train_a_fleet(folders):
    export, serve, embed, _ = blocks("python")
    server, *devices = folders
    run([sys.executable, "-c", export], server)
    with MosquittoBroker() as broker, ThreadPoolExecutor() as pool:
        serve, embed = (code.replace("mqtt://localhost:1883", broker.url) for code in (serve, embed))
        serving = pool.submit(run, [sys.executable, "-c", serve], server)
        embedded = [pool.submit(run, [sys.executable, "-c", embed], folder) for folder in devices]
        assert serving.result().count("RoundResult(") == 3
        for device in embedded:
            assert "this is a " in device.result()
    before, after = (Bundle.read(server / name).weights for name in ("model.edge", "trained.edge"))
    assert all((before[name] != after[name]).any() for name in before)


def test_the_skewed_settings_are_a_run_and_the_engine_runs_their_like(tmp_path):
    export, *_, simulated = blocks("python")
    (settings,) = blocks("toml")
    (tmp_path / "skewed.toml").write_text(settings)
    config = make_config(read_toml(tmp_path / "skewed.toml"))
    assert config.facts() == ("histogram", "descriptor")
    run([sys.executable, "-c", export], tmp_path)
    said = run([sys.executable, "-c", simulated], tmp_path)
    assert float(said.splitlines()[-1].split()[0]) > 50


def test_the_shell_example_trains_a_fleet(folders):
    server, *devices = folders
    (server / "my_model.py").write_text(MODEL)
    (block,) = blocks("sh")
    with MosquittoBroker() as broker, ThreadPoolExecutor() as pool:
        lines = block.replace("mqtt://localhost:1883", broker.url).strip().splitlines()
        export, serve, device = ([sys.executable, "-m", "edge_sdk.cli", *line.split()[1:]] for line in lines)
        run(export, server)
        serving = pool.submit(run, serve, server)
        trained = [
            pool.submit(run, [*device, "--work-dir", str(folder / "state")], folder) for folder in devices
        ]
        assert serving.result().count(" devices  ") == 3
        for each in trained:
            assert "updates accepted" in each.result()
    assert (server / "trained.edge").exists()


def test_the_commands_and_files_that_it_names_exist():
    for name in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / name).exists(), name
    known = subprocess.run(
        [sys.executable, "-m", "edge_sdk.cli", "--help"], capture_output=True, text=True, check=False
    )
    for command in re.findall(r"edge-sdk ([a-z-]+)", README):
        assert re.search(rf"^ +{command}\b", known.stdout, re.MULTILINE), command


def test_its_figures_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["figures"]
    (row,) = re.findall(r"^\| mean of 5 seeds.*\| ([\d.]+) % \| ([\d.]+) % \|$", README, re.MULTILINE)
    assert row == (f"{figures['accuracy.fedavg']:.1f}", f"{figures['accuracy.fedavgm']:.1f}")


def test_its_figures_of_codecs_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "benchmarks" / "results" / "codecs.json").read_text())["figures"]
    names = ("fp32", "fp16", "int8", "int8_zstd")
    for label, key, digits in (
        ("bytes of the updates", "bytes", 3),
        ("accuracy lost, points", "accuracy_loss", 2),
    ):
        (row,) = re.findall(rf"^\| {label} \| (.*) \|$", README, re.MULTILINE)
        assert row.split(" | ") == [f"{figures[f'{key}.{name}']:.{digits}f}" for name in names]
    assert f"{figures['overhead.fp32']:.3f} times" in README


def test_its_figures_of_skewed_data_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "benchmarks" / "results" / "noniid.json").read_text())["figures"]
    pairs = {
        "FedAvg, FedAvgM": ("alpha0.five.fedavg", "alpha0.five.fedavgm"),
        "FedAvg on identical data, all four at once on these": ("iid.fedavg", "alpha0_1.full"),
        "FedAvg, Astraea": ("longtail.fedavg", "longtail.astraea"),
    }
    for label, cells in pairs.items():
        said = [
            ", ".join(f"{figures[f'accuracy.{data}.{cell}']:.1f}" for cell in cells)
            for data in ("fashion", "cifar10")
        ]
        assert f"| {label} | {' | '.join(said)} |" in README
    strategies = ("fedavg", "fedprox", "fedavgm", "fldg_l", "astraea", "fedavgm_ccvr", "full")
    labels = {
        "alpha0_1": "Dirichlet 0.1",
        "alpha0": "one class a device",
        "longtail": "long tail",
        "iid": "identical",
        "alpha100": "Dirichlet 100",
    }
    for data, (split, label) in product(("fashion", "cifar10"), labels.items()):
        row = [f"{figures[f'accuracy.{data}.{split}.{name}']:.1f}" for name in strategies]
        assert f"| {label} | {' | '.join(row)} |" in README
    assert f"adds up to {figures['ccvr_gain.best']:.1f} points" in README
    assert (
        f"takes {figures['bytes_to_target.cifar10.longtail.astraea']:.2f} of FedAvg's bytes"
        in README.replace("\n", " ")
    )


def test_its_figures_of_chaos_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "benchmarks" / "results" / "chaos.json").read_text())["figures"]
    (row,) = re.findall(r"^\| (\d+) in (\d+) runs \| (.*) \|$", README, re.MULTILINE)
    assert row[:2] == (str(figures["faults"]), str(figures["runs"]))
    counts = (figures[name] for name in ("aborted", "replaced", "lost", "twice"))
    assert row[2].split(" | ") == [*map(str, counts), "0"]
    assert (figures["replay_bits"], figures["undisturbed_bits"]) == (1, 1)
    assert f"The {figures['undisturbed_runs']} synchronous runs" in README


def test_its_figures_of_malformed_input_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())["figures"]
    row = (
        f"| {figures['inputs']:,} | {figures['crashes']} | {figures['peak_mb']:.0f} MB | "
        f"{figures['slowest_ms'] / 1000:.1f} s |"
    )
    assert row in README


def test_the_figures_of_training_steps_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "benchmarks" / "results" / "train_step.json").read_text())["figures"]
    said = " ".join((ROOT / "docs" / "executorch.md").read_text().split())
    kinds = ("onnx", "executorch")
    for name in ("cnn", "bn_dw", "mobilenet_v2_32", "mobilenet_v2_96", "head"):
        row = [f"{figures[f'{kind}_over_eager.{name}']:.2f}" for kind in kinds]
        row += [f"{figures[f'{kind}_rss_over_eager.{name}']:.2f}" for kind in kinds]
        row += [f"{figures[f'{prefix}grad_error.{name}']:.1f}" for prefix in ("", "executorch_")]
        row.append(f"{figures[f'executorch_bytes.{name}'] / 1000:.0f}")
        assert f" | {' | '.join(row)} |" in said, name
    assert f"takes {figures['stock_over_executorch.cnn']:.0f} times as long" in said
    gaps = (f"{prefix}loss_gap.{name}" for prefix in ("", "executorch_") for name in ("cnn", "bn_dw", "head"))
    assert f"within {max(figures[key] for key in gaps):.2f} % of PyTorch's" in said
    small, large = "loss_gap.mobilenet_v2_32", "loss_gap.mobilenet_v2_96"
    nudged = [figures[f"nudged_{gap}"] for gap in (small, large)]
    assert f"{nudged[0]:.0f} % away at 32 pixels and {nudged[1]:.0f} % at 96" in said
    assert f"ONNX Runtime is {figures[small]:.1f} % and {figures[large]:.1f} % away" in said
    stated = [figures[f"executorch_{gap}"] for gap in (small, large)]
    assert f"ExecuTorch {stated[0]:.1f} % and {stated[1]:.1f} %." in said
    settled = [
        max(figures[f"{prefix}settled_{gap}"] for prefix in prefixes for gap in (small, large))
        for prefixes in (("", "executorch_"), ("nudged_",))
    ]
    assert f"lies within {settled[0]:.2f} % of PyTorch's, and PyTorch's own" in said
    assert f"1e-7 larger within {settled[1]:.2f} %. The curves" in said
    assert f"ONNX's {figures['export_seconds.mobilenet_v2_32']:.0f} seconds" in said
    assert f"wrong from step {figures['stock_wrong_at.cnn']} on" in said
