"""What the ONNX files are made of: any stock ONNX Runtime must run them, and nothing else may be in them."""

import subprocess
import sys

import onnx
import pytest
from onnx import numpy_helper
from torch import nn

from edge_export import export_bundle
from edge_sdk.bundle import Bundle

METHODS = ("train", "evaluate", "predict", "embed")


@pytest.fixture(scope="module", params=["digits", "depthwise"])
def bundle(request) -> Bundle:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("method", METHODS)
def test_every_operator_is_a_standard_one_that_onnxruntime_1_20_reads(bundle, method):
    model = onnx.load_model_from_string(bundle.program("onnx", method))
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version <= 10
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 18)]
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.functions


def test_a_matrix_that_multiplies_at_every_frequency_is_stored_once():
    model = nn.Sequential(nn.Conv2d(8, 8, 5, padding=2), nn.Flatten(), nn.Linear(512, 4))
    step = onnx.load_model_from_string(export_bundle(model, (8, 8, 8)).program("onnx", "train"))
    matrices = [numpy_helper.to_array(constant) for constant in step.graph.initializer]
    assert not any(m.ndim > 2 and len(m) > 1 and (m[0] == m[1]).all() for m in matrices)
    assert any(m.shape == (30, 16) for m in matrices)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6])
def test_an_activation_comes_right_behind_the_convolution_that_ends_batch_norm(activation):
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), activation()),
        *(nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    step = onnx.load_model_from_string(export_bundle(model, (3, 8, 8)).program("onnx", "train")).graph
    made_by = {name: node.op_type for node in step.node for name in node.output}
    assert "Conv" in {made_by.get(node.input[0]) for node in step.node if node.op_type in ("Relu", "Clip")}


def test_what_follows_a_wide_depthwise_convolution_has_channels_outermost():
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    bundle = export_bundle(model, (3, 24, 24))

    def operators_of(method: str) -> list[str]:
        return [
            node.op_type for node in onnx.load_model_from_string(bundle.program("onnx", method)).graph.node
        ]

    operators = operators_of("train")
    # BatchNorm's affine part is a convolution of long rows there, and one operator for two elsewhere.
    assert "BatchNormalization" not in operators
    assert operators.count("Transpose") <= 8
    assert "Transpose" not in operators_of("predict")


@pytest.mark.parametrize("method", METHODS)
def test_no_metadata_and_no_path_of_a_source_file_is_left(bundle, method):
    data = bundle.program("onnx", method)
    model = onnx.load_model_from_string(data)
    parts = [model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output]
    assert not any(part.metadata_props or part.doc_string for part in parts)
    assert not model.graph.value_info
    assert b".py" not in data
    assert b"site-packages" not in data


def test_every_weight_enters_and_leaves_the_train_program(bundle):
    graph = onnx.load_model_from_string(bundle.program("onnx", "train")).graph
    names = {parameter.name for parameter in bundle.manifest.parameters}
    noise = {noise.name for noise in bundle.manifest.noise}
    others = {"x", "y", "sample_weight", "lr", "weight_decay"} | noise
    assert {value.name for value in graph.input} == {f"weights/{name}" for name in names} | others
    assert {value.name for value in graph.output} == {f"new/{name}" for name in names} | {
        "loss_sum",
        "correct",
    }
    assert not {f"weights/{name}" for name in names} & {value.name for value in graph.initializer}


def test_inputs_and_outputs_have_the_declared_types_and_a_free_batch(bundle):
    graph = onnx.load_model_from_string(bundle.program("onnx", "train")).graph
    types = {value.name: value.type.tensor_type for value in [*graph.input, *graph.output]}
    assert types["x"].elem_type == types["sample_weight"].elem_type == onnx.TensorProto.FLOAT
    assert types["y"].elem_type == types["correct"].elem_type == onnx.TensorProto.INT64
    assert all(not types[name].shape.dim for name in ("lr", "weight_decay", "loss_sum", "correct"))
    assert {types[name].shape.dim[0].dim_param for name in ("x", "y", "sample_weight")} == {"batch"}


EXPORT = """
import sys, torch
from edge_export import export_bundle
from edge_export.models import DigitsCNN
torch.manual_seed(1)
bundle = export_bundle(DigitsCNN(), (1, 8, 8), mean=[0.3], std=[0.4], name="digits")
sys.stdout.write(bundle.sha256)
"""


def test_the_same_model_gives_the_same_bytes_in_another_process(digits):
    other = subprocess.run(
        [sys.executable, "-c", EXPORT],
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert other.stdout == digits.sha256
