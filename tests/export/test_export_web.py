"""The same step, the same numbers, in ONNX Runtime Web under Node."""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch_oracle import Arrays, assert_steps_like_torch, feed_of, random_batch, torch_step

from edge_export.classifier import examine
from edge_export.models import MobileNetV2
from edge_export.onnx import lower
from edge_export.programs import all_programs

WEB = Path(__file__).resolve().parent.parent / "web"


@pytest.fixture(scope="session")
def web(tmp_path_factory) -> Path:
    """A folder in which the pinned ONNX Runtime Web is installed."""
    if shutil.which("npm") is None:
        pytest.fail("npm is missing: install Node.js 18 or later (apt-get install nodejs npm)")
    folder = tmp_path_factory.mktemp("web")
    for file in WEB.iterdir():
        shutil.copy(file, folder)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=280)
    return folder


def run_in_web(web: Path, folder: Path, program: bytes, feed: dict) -> dict:
    (folder / "program.onnx").write_bytes(program)
    listed = []
    for index, (name, tensor) in enumerate(feed.items()):
        (folder / f"input{index}").write_bytes(tensor.tobytes())
        entry = {"name": name, "file": f"input{index}", "dtype": str(tensor.dtype), "shape": tensor.shape}
        listed.append(entry)
    (folder / "feed.json").write_text(json.dumps(listed))
    done = subprocess.run(
        ["node", "run.mjs", str(folder)], cwd=web, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return {
        output["name"]: np.frombuffer((folder / output["file"]).read_bytes(), output["dtype"]).reshape(
            output["shape"]
        )
        for output in json.loads((folder / "outputs.json").read_text())
    }


def train_feed(bundle, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    manifest = bundle.manifest
    return {
        **{f"weights/{name}": tensor for name, tensor in bundle.weights.items()},
        "x": rng.standard_normal((5, *manifest.input.shape)).astype(np.float32),
        "y": rng.integers(0, manifest.classes, 5),
        "sample_weight": np.array([1, 1, 0, 1, 1], np.float32),
        "lr": np.array(0.1, np.float32),
        "weight_decay": np.array(0.01, np.float32),
        **{noise.name: rng.random((5, *noise.shape), np.float32) for noise in manifest.noise},
    }


@pytest.mark.full
@pytest.mark.parametrize("method", ["train", "evaluate", "predict", "embed"])
@pytest.mark.parametrize("name", ["cnn", "norm"])
def test_a_program_gives_the_same_numbers_in_the_browsers_runtime(name, method, web, tmp_path, request):
    bundle = request.getfixturevalue(name)
    program = bundle.program("onnx", method)
    session = onnxruntime.InferenceSession(program, providers=["CPUExecutionProvider"])
    known = train_feed(bundle, seed=1)
    feed = {node.name: known[node.name] for node in session.get_inputs()}
    expected = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
    found = run_in_web(web, tmp_path, program, feed)
    assert found.keys() == expected.keys()
    for output, tensor in expected.items():
        np.testing.assert_allclose(found[output], tensor, rtol=1e-4, atol=1e-5, err_msg=output)


def mobilenet_v2(activation: type[nn.Module]) -> nn.Module:
    """MobileNetV2 without its dropout, with another activation in place of ReLU6."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MobileNetV2(dropout=0.0)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(module, name, activation())
    return model


def step_in_web(web: Path, folder: Path, model: nn.Module, batch: Arrays) -> Arrays:
    program = lower(all_programs(examine(model, (3, 32, 32)))["train"])
    taken = {value.name for value in onnx.load_model_from_string(program).graph.input}
    feed = {name: value for name, value in feed_of(model, batch).items() if name in taken}
    return run_in_web(web, folder, program, feed)


@pytest.mark.full
def test_mobilenet_v2_steps_as_torch_does_but_for_its_kinks(web, tmp_path):
    # With ReLU6 a single one of 623,040 pre-activations that rounded to the other side of a kink, in ONNX
    # Runtime as in PyTorch's float32 and not in the browser's runtime, moved weights by 0.37. By float64
    # gradients on the side that each of them took, they are within 0.025 of steps of up to 29.
    model, batch = mobilenet_v2(nn.SiLU), random_batch((3, 32, 32), 10, 5)
    assert_steps_like_torch(step_in_web(web, tmp_path, model, batch), model, batch)


@pytest.mark.full
def test_mobilenet_v2_with_its_kinks_has_torchs_loss_and_statistics(web, tmp_path):
    model, batch = mobilenet_v2(nn.ReLU6), random_batch((3, 32, 32), 10, 5)
    found, expected = step_in_web(web, tmp_path, model, batch), torch_step(model, batch, torch.float64)
    for name, value in expected.items():
        if name == "loss_sum" or "running" in name:
            result = found[name if name == "loss_sum" else f"new/{name}"]
            np.testing.assert_allclose(result, value, rtol=1e-3, atol=1e-4, err_msg=name)
    assert all(np.isfinite(value).all() for value in found.values())
