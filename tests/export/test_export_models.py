"""The models of the papers: their sizes as published, and the usual names of their weights."""

import numpy as np
import onnx
import pytest
import torch
from torch_oracle import Run, feed_of, random_batch, torch_step

from edge_export import models
from edge_export.classifier import examine
from edge_export.onnx import lower
from edge_export.programs import all_programs

COMMON = {
    "Add",
    "And",
    "ArgMax",
    "BatchNormalization",
    "Cast",
    "Clip",
    "Concat",
    "ConstantOfShape",
    "Conv",
    "ConvTranspose",
    "Div",
    "Equal",
    "Exp",
    "Expand",
    "Gather",
    "Gemm",
    "Greater",
    "GreaterOrEqual",
    "HardSigmoid",
    "Identity",
    "LogSoftmax",
    "MatMul",
    "Max",
    "Min",
    "Mul",
    "Neg",
    "Pad",
    "Reciprocal",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Shape",
    "Slice",
    "Sqrt",
    "Sub",
    "Transpose",
}
"""What a step of MobileNetV2 may be made of."""


@pytest.mark.parametrize(
    ("model", "shape", "weights"),
    [
        (models.CifarCNN(), (3, 24, 24), 1_068_298),
        (models.WideCNN(), (3, 32, 32), 2_156_490),
        (models.CcvrCNN(), (3, 32, 32), 62_006 - 850 + 84 * 85 + 256 * 85 + 2_570),
        (models.MobileNetV2(1000), (3, 32, 32), 3_504_872),
    ],
)
def test_a_model_is_as_large_as_published_and_gives_logits(model, shape, weights):
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    logits = model(torch.zeros(2, *shape))
    assert logits.shape == (2, model.head.out_features)


def test_mobilenet_v2_has_torchvisions_names():
    names = models.MobileNetV2().state_dict().keys()
    assert len(names) == 314
    assert next(iter(names)) == "features.0.0.weight"
    assert {"features.1.conv.0.0.weight", "features.1.conv.2.running_var", "features.18.1.bias"} <= names
    assert list(names)[-2:] == ["classifier.1.weight", "classifier.1.bias"]


@pytest.fixture(scope="module")
def mobilenet_step() -> bytes:
    torch.manual_seed(0)
    return lower(all_programs(examine(models.MobileNetV2(), (3, 32, 32)))["train"])


@pytest.mark.full
def test_the_step_of_mobilenet_v2_is_small_and_of_standard_operators_alone(mobilenet_step):
    model = onnx.load_model_from_string(mobilenet_step)
    onnx.checker.check_model(model, full_check=True)
    assert len(mobilenet_step) < 1_200_000
    assert {node.domain for node in model.graph.node} == {""}
    assert (model.ir_version, model.opset_import[0].version) == (10, 18)
    assert {node.op_type for node in model.graph.node} <= COMMON


@pytest.mark.full
def test_a_step_of_mobilenet_v2_is_a_step_of_torch_sgd(mobilenet_step, run: Run):
    torch.manual_seed(0)
    model = models.MobileNetV2(dropout=0.0)
    batch = random_batch((3, 32, 32), 10, 6)
    # Noise of 1 keeps every unit, scaled by 1 / 0.8 where the model without dropout scales by nothing.
    feed = feed_of(model, batch) | {"noise0": np.ones((6, 1280), np.float32)}
    feed["weights/classifier.1.weight"] = feed["weights/classifier.1.weight"] * np.float32(0.8)
    result = run(mobilenet_step, feed)
    expected = torch_step(model, batch, torch.float64)
    np.testing.assert_allclose(result["loss_sum"], expected["loss_sum"], rtol=1e-4)
    for name in ("0.1.running_var", "9.conv.1.1.running_mean", "18.1.running_var"):
        name = f"features.{name}"
        np.testing.assert_allclose(result[f"new/{name}"], expected[name], rtol=1e-3, atol=1e-5)
