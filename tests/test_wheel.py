"""The device part as it is installed: from the wheel, alone, where there is no PyTorch."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.data import ArrayDataset
from edge_server import RunConfig, Server
from edge_simulation import EmbeddedBroker
from edge_simulation.fleet import DeviceProcesses

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def other_pythons() -> list[Path]:
    """Interpreters on this machine that the SDK supports, but for the one that runs this."""
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {}
    for version in VERSIONS:
        places = [
            shutil.which(f"python{version}"),
            *Path.home().glob(f".pyenv/versions/{version}.*/bin/python"),
        ]
        for place in filter(None, places):
            answers = subprocess.run([place, "--version"], capture_output=True, text=True, check=False)
            if answers.returncode == 0 and f" {version}." in answers.stdout:
                found[version] = Path(place)
    return [python for version, python in found.items() if version != this]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return next(folder.glob("edge_sdk_fl-*.whl"))


def install(python: str | Path, wheel: Path, folder: Path) -> str:
    """A fresh environment with the wheel and its extra ``[onnx]``; returns its interpreter."""
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True, timeout=120)
    inside = folder / "bin" / "python"
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    installer = [uv, "pip", "install", "--python", inside] if uv else [inside, "-m", "pip", "install"]
    lock = ROOT / "requirements" / "base.txt"
    # Without the hashes: the wheel itself has none there.
    subprocess.run(
        [*map(str, installer), f"{wheel}[onnx]", "-c", str(lock)],
        check=True,
        timeout=280,
        env={**os.environ, "UV_REQUIRE_HASHES": "0"},
    )
    return str(inside)


def train(cnn, folder: Path, python: str) -> dict:
    """Two rounds of three device processes under ``python``; the weights that come out."""
    rng = np.random.default_rng(0)
    shares = [
        ArrayDataset(rng.integers(0, 256, (20 + i, 8, 8), np.uint8), rng.integers(0, 4, 20 + i))
        for i in range(3)
    ]
    with EmbeddedBroker() as broker:
        config = RunConfig(fleet="f", rounds=2, participants=3, evaluation="none", lr=0.1)
        devices = DeviceProcesses(
            shares, ["a", "b", "c"], broker=broker.url, fleet="f", folder=folder, python=python
        )
        with devices:
            outcome = Server(cnn, config, broker=broker.url, work_dir=folder / "server").run()
            devices.wait(10)
            devices.check()
    assert outcome.finished
    assert [result.participants for result in outcome.rounds] == [3, 3]
    return outcome.bundle.weights


def test_devices_without_pytorch_train_the_same_model(wheel, cnn, tmp_path):
    bare = install(sys.executable, wheel, tmp_path / "env")
    look = (
        "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, ('torch', 'sqlalchemy', 'sklearn'))))"
    )
    subprocess.run([bare, "-c", look], check=True)
    here = train(cnn, tmp_path / "here", sys.executable)
    there = train(cnn, tmp_path / "there", bare)
    for name, weight in here.items():
        np.testing.assert_array_equal(weight, there[name])


def test_a_device_installed_alone_trains_on_another_python(wheel, cnn, tmp_path):
    pythons = other_pythons()
    assert pythons, "these tests want a second Python that the SDK supports: install one"
    train(cnn, tmp_path, install(pythons[0], wheel, tmp_path / "env"))


@pytest.mark.full
def test_a_device_installed_alone_trains_on_every_other_python(wheel, cnn, tmp_path):
    pythons = other_pythons()
    assert pythons, "these tests want a second Python that the SDK supports: install one"
    for number, python in enumerate(pythons):
        folder = tmp_path / str(number)
        train(cnn, folder, install(python, wheel, folder / "env"))


def test_a_command_whose_extra_is_missing_names_it(wheel, tmp_path):
    bare = install(sys.executable, wheel, tmp_path / "env")
    for command, extra in (("serve", "server"), ("export", "export"), ("demo", "simulation")):
        arguments = (
            ["m:f", "--input", "1x8x8", "--classes", "2", "-o", "x.edge"] if command == "export" else []
        )
        done = subprocess.run(
            [bare, "-m", "edge_sdk.cli", command, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert f"edge-sdk-fl[{extra}]" in done.stderr
        assert len(done.stderr.splitlines()) == 1
