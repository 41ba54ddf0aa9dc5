"""``edge-sdk export`` as a user runs it, from a folder that holds their module."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
from torch_oracle import Run

from edge_export.models import DigitsCNN, MobileNetV2
from edge_sdk.bundle import Bundle
from edge_sdk.features import Hashing
from edge_sdk.manifest import Pipeline

MODULE = """
from edge_export.models import DigitsCNN
number = 3
def broken(): raise ValueError("no weights here")
"""


def export(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "my_net.py").write_text(MODULE)
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from edge_sdk.cli import main; sys.exit(main())",
            "export",
            *arguments,
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_it_exports_a_module_of_the_current_folder_with_weights_and_then_plain_onnx(tmp_path, run: Run):
    model = DigitsCNN()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "w.safetensors")
    shape = ("--input", "1x8x8", "--classes", "10", "--weights", "w.safetensors")
    prepared = ("--mean", "0.5", "--crop-from", "9x10", "--flip", "--standardise")
    made = export(tmp_path, "my_net:DigitsCNN", *shape, *prepared, "--name", "mine", "-o", "m.edge")
    assert made.returncode == 0, made.stderr
    stages = re.findall(r"^ +\d+ s  (.*)$", made.stderr, re.MULTILINE)
    assert stages[:4] == ["ONNX: train", "ONNX: evaluate", "ONNX: predict", "ONNX: embed"]
    bundle = Bundle.read(tmp_path / "m.edge")
    assert (bundle.manifest.name, bundle.manifest.input.mean) == ("mine", (0.5,))
    assert bundle.manifest.input.pipeline == Pipeline((9, 10), flip=True, standardise=True)
    assert (bundle.weights["head.bias"] == model.head.bias.detach().numpy()).all()
    plain = export(tmp_path, "--inference", "m.edge", "-o", "m.onnx")
    assert plain.returncode == 0, plain.stderr
    assert (tmp_path / "m.onnx").stat().st_size > 0


def test_it_exports_a_describer_as_asked_for(tmp_path):
    state = {name: tensor for name, tensor in MobileNetV2().state_dict().items() if "features" in name}
    safetensors.torch.save_file(state, tmp_path / "v2.safetensors")
    describer = ("--describe", "--describe-weights", "v2.safetensors", "--describe-dims", "5")
    sizes = ("--describe-size", "32", "--lsh-width", "1.5")
    made = export(tmp_path, "my_net:DigitsCNN", *SHAPE, *describer, *sizes, "-o", "m.edge")
    assert (made.returncode, "Warning" in made.stderr) == (0, False), made.stderr
    bundle = Bundle.read(tmp_path / "m.edge")
    assert bundle.manifest.describe.dims == 5
    assert Hashing.of(bundle).r == 1.5


SHAPE = ["--input", "1x8x8", "--classes", "10"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my_net", *SHAPE], "'my_net' is not MODULE:CALLABLE"),
        (["other_net:Net", *SHAPE], "there is no module 'other_net'"),
        (["my_net:Missing", *SHAPE], "my_net has no 'Missing'"),
        (["my_net:number", *SHAPE], "gives a int, not an nn.Module"),
        (["my_net:broken", *SHAPE], "no weights here"),
        (["my_net:DigitsCNN", "--input", "8x8", "--classes", "10"], "is not CxHxW"),
        (["my_net:DigitsCNN", "--classes", "10"], "needs --input"),
        (
            ["my_net:DigitsCNN", *SHAPE, "--runtime", "onnx,tflite"],
            "--runtime onnx,tflite: take of onnx, executorch",
        ),
        (["my_net:DigitsCNN", *SHAPE, "--weights", "none.safetensors"], "cannot be read as safetensors"),
        (["my_net:DigitsCNN", *SHAPE, "--mean", "a"], "is not numbers"),
        (["my_net:DigitsCNN", *SHAPE, "--lsh-width", "2"], "--lsh-width need --describe"),
        (["my_net:DigitsCNN", *SHAPE, "--crop-from", "9"], "--crop-from '9' is not HxW"),
        ([], "give either MODULE:CALLABLE or --inference"),
        (["--inference", "none.edge"], "none.edge: cannot be read"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, message):
    from edge_sdk.cli import main

    (tmp_path / "my_net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_net", None)
    assert main(["export", *arguments, "-o", "m.edge"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
