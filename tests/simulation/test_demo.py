"""The demo as a user runs it: one command, processes, a broker of its own, files at the end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import onnxruntime
import pytest
from waiting import until

from edge_sdk import Bundle
from edge_sdk.data import ArrayDataset, save_npz

COMMAND = [sys.executable, "-m", "edge_sdk.cli", "demo"]


def run_demo(*options, timeout=150):
    return subprocess.run(
        [*COMMAND, *map(str, options)], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A demo of ten devices and three rounds: its output folder and what it printed."""
    out = tmp_path_factory.mktemp("demo")
    done = run_demo("--devices", 10, "--rounds", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def figures(out):
    summary = json.loads((out / "summary.json").read_text())
    for run in summary["runs"].values():
        for each in run["rounds"]:
            assert each.pop("seconds") > 0
    return summary


def test_a_line_a_round_and_a_comparison_are_shown(short):
    _, shown = short
    assert shown.count(" devices  ") == 6
    assert "Same split, same seed" in shown


def test_the_summary_has_every_round_of_both_strategies(short):
    out, _ = short
    summary = figures(out)
    assert summary["seed"] == 0
    assert set(summary["runs"]) == {"fedavg", "fedavgm"}
    for run in summary["runs"].values():
        assert [each["round"] for each in run["rounds"]] == [1, 2, 3]
        assert run["final_accuracy"] == run["rounds"][-1]["accuracy"]
        for each in run["rounds"]:
            assert set(each) == {"round", "accuracy", "loss", "participants", "bytes_up", "bytes_down"}
            assert each["participants"] == 5


def test_the_model_for_inference_is_the_trained_bundle(short):
    out, _ = short
    bundle = Bundle.read(out / "model.edge")
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).random((1, *bundle.manifest.input.shape), np.float32)
    (logits,) = session.run(None, {"x": image})
    predict = onnxruntime.InferenceSession(bundle.program("onnx", "predict"))
    feed = {f"weights/{name}": tensor for name, tensor in bundle.weights.items()}
    normalised = (image - bundle.manifest.input.mean[0]) / bundle.manifest.input.std[0]
    (expected,) = predict.run(None, {**feed, "x": normalised.astype(np.float32)})
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_the_report_needs_nothing_from_the_net(short):
    out, _ = short
    page = (out / "report.html").read_text()
    assert "<script src" not in page
    assert "FedAvgM" in page


def test_the_same_seed_gives_the_same_figures(short, tmp_path):
    out, _ = short
    assert run_demo("--devices", 10, "--rounds", 3, "--out", tmp_path).returncode == 0
    assert figures(tmp_path) == figures(out)


def test_it_runs_on_data_of_ones_own(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (120, 12, 10, 3), np.uint8)
    save_npz(tmp_path / "mine.npz", ArrayDataset(images, rng.integers(0, 3, 120)))
    done = run_demo("--data", tmp_path / "mine.npz", "--devices", 2, "--rounds", 1, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert Bundle.read(tmp_path / "out" / "model.edge").manifest.input.shape == (3, 12, 10)


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run_demo("--port", taken.getsockname()[1], "--out", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "in use" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--seed", -1),
        ("--rounds", 0),
        ("--devices", 1),
        ("--alpha", -1),
        ("--alpha", "nan"),
        ("--out", "/etc/passwd/x"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line_before_anything_starts(options, tmp_path):
    done = run_demo("--out", tmp_path, *options)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_a_data_set_that_is_not_there_is_one_line(tmp_path):
    done = run_demo("--data", tmp_path / "nothing", "--out", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("shown", ["images on each of", "exported", "  3/500"])
def test_ctrl_c_ends_every_process_without_a_traceback(shown, tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "--rounds", "500", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    deadline = time.monotonic() + 120
    for line in process.stdout:
        assert time.monotonic() < deadline
        if shown in line:
            break
    # As a terminal does: to the whole foreground group.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in errors
    # What is killed in its first moments is there a little longer.
    until(lambda: not processes_of(process.pid), 5)


def processes_of(group):
    done = subprocess.run(["pgrep", "-g", str(group)], capture_output=True, text=True, check=False)
    return done.stdout
