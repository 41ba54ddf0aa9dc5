"""The bundle that an export gives: what its manifest says, and that it survives writing and new weights."""

import copy

import numpy as np
import pytest
import torch
from torch_oracle import Run, feed_of, random_batch

import edge_export
from edge_export.models import make_cnn
from edge_sdk.bundle import Bundle
from edge_sdk.manifest import Pipeline


def test_a_bundle_survives_writing_and_reading(digits, digits_model, tmp_path):
    digits.write(tmp_path / "digits.edge")
    read = Bundle.read(tmp_path / "digits.edge")
    assert read == digits
    for name, tensor in digits_model.state_dict().items():
        assert np.array_equal(read.weights[name], tensor.numpy())


def test_new_weights_change_what_the_bundle_predicts_and_nothing_else(digits, run: Run):
    other = make_cnn((1, 8, 8), 10, seed=9)
    changed = digits.with_weights({name: tensor.numpy() for name, tensor in other.state_dict().items()})
    assert changed.program("onnx", "train") == digits.program("onnx", "train")
    x = random_batch((1, 8, 8), 10, 3)["x"]
    feed = {f"weights/{name}": value for name, value in changed.weights.items()} | {"x": x}
    with torch.no_grad():
        expected = other(torch.tensor(x)).numpy()
    np.testing.assert_allclose(
        run(changed.program("onnx", "predict"), feed)["logits"], expected, rtol=1e-4, atol=1e-5
    )


def test_the_manifest_describes_the_model(digits):
    manifest = digits.manifest
    assert (manifest.name, manifest.classes, manifest.feature_size) == ("digits", 10, 64)
    assert manifest.head == ("head.weight", "head.bias")
    assert manifest.input.shape == (1, 8, 8)
    assert (manifest.input.mean, manifest.input.std) == ((0.3,), (0.4,))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("block.0.weight", "mean"),
        ("norm.bias", "mean"),
        ("norm.running_var", "statistic"),
        ("stem.weight", "statistic"),
        ("norm.num_batches_tracked", "counter"),
    ],
)
def test_each_tensor_has_its_rule_of_aggregation(depthwise, name, rule):
    assert depthwise.manifest.rules[name] == rule


def test_noise_inputs_are_declared_by_the_shape_of_one_sample(run: Run):
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(16, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 2)
    )
    bundle = edge_export.export_bundle(model, (1, 4, 4))
    assert [(noise.name, noise.shape) for noise in bundle.manifest.noise] == [("noise0", (5,))]
    feed = feed_of(model, random_batch((1, 4, 4), 2, 3) | {"noise0": np.zeros((3, 5), np.float32)})
    result = run(bundle.program("onnx", "train"), feed)
    # Noise of 0 drops every unit, so that the head's weight gets no gradient and its bias does.
    assert np.array_equal(result["new/3.weight"], feed["weights/3.weight"])
    assert not np.array_equal(result["new/3.bias"], feed["weights/3.bias"])


@pytest.fixture(scope="module")
def in_eval_mode(depthwise_model) -> tuple[torch.nn.Module, Bundle]:
    model = copy.deepcopy(depthwise_model).eval()
    return model, edge_export.export_bundle(model, (3, 13, 11))


def test_the_users_model_keeps_its_weights_and_its_mode(in_eval_mode, depthwise_model):
    model, _ = in_eval_mode
    assert not any(module.training for module in model.modules())
    before = depthwise_model.state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_in_eval_mode_gives_the_same_bundle(in_eval_mode, depthwise):
    assert in_eval_mode[1] == depthwise


def test_seeded_models_are_the_same_and_leave_the_random_state_alone():
    state = torch.get_rng_state()
    first, second = make_cnn((3, 32, 32), 10, seed=4), make_cnn((3, 32, 32), 10, seed=4)
    assert torch.equal(first.conv1.weight, second.conv1.weight)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [(8, 7), (0, 8), (-8, 8)])
def test_a_pipeline_of_images_smaller_than_the_models_is_refused(digits_model, size):
    with pytest.raises(edge_export.ExportError, match=r"\[8, 8\] pixels cannot be cut out of images"):
        edge_export.export_bundle(digits_model, (1, 8, 8), pipeline=Pipeline(size))
