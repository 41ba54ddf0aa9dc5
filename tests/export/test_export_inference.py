"""The inference-only file; the oracle is the eager model on images normalised by hand."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch_oracle import Run

from edge_export import export_bundle, inference_onnx
from edge_sdk.manifest import Pipeline


def test_it_predicts_as_the_eager_model_does_on_raw_images(digits, digits_model, run: Run):
    images = np.random.default_rng(0).random((5, 1, 8, 8), np.float32)
    logits = run(inference_onnx(digits), {"x": images})["logits"]
    with torch.no_grad():
        expected = digits_model((torch.tensor(images) - 0.3) / 0.4).numpy()
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_each_channel_has_its_own_normalisation(run: Run):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    bundle = export_bundle(model, (3, 2, 2), mean=[0.1, 0.5, 0.9], std=[1.0, 0.5, 0.1])
    images = np.random.default_rng(0).random((4, 3, 2, 2), np.float32)
    mean, std = torch.tensor([0.1, 0.5, 0.9]), torch.tensor([1.0, 0.5, 0.1])
    with torch.no_grad():
        expected = model((torch.tensor(images) - mean.view(3, 1, 1)) / std.view(3, 1, 1)).numpy()
    np.testing.assert_allclose(
        run(inference_onnx(bundle), {"x": images})["logits"], expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("size", [(2, 3), (5, 4)])
@pytest.mark.parametrize("standardise", [False, True])
def test_an_image_goes_through_the_pipeline_without_its_chance(size, standardise, run: Run):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(18, 2))
    pipeline = Pipeline(size, flip=True, standardise=standardise)
    bundle = export_bundle(model, (3, 2, 3), mean=[0.1, 0.5, 0.9], std=[1.0, 0.5, 0.1], pipeline=pipeline)
    images = torch.rand(4, 3, *size)
    images[0] = torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1)  # one grey: no deviation
    top, left = {(2, 3): (0, 0), (5, 4): (1, 0)}[size]
    x = images[:, :, top : top + 2, left : left + 3] - torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1)
    x = x / torch.tensor([1.0, 0.5, 0.1]).view(3, 1, 1)
    if standardise:
        deviation = x.flatten(1).std(1, correction=0).clamp(min=18**-0.5)
        x = (x - x.flatten(1).mean(1).view(-1, 1, 1, 1)) / deviation.view(-1, 1, 1, 1)
    with torch.no_grad():
        expected = model(x).numpy()
    found = run(inference_onnx(bundle), {"x": images.numpy()})["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_its_input_is_declared_as_large_as_the_data_sets_images():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    bundle = export_bundle(model, (3, 2, 2), pipeline=Pipeline((5, 4)))
    (x,) = onnx.load_model_from_string(inference_onnx(bundle)).graph.input
    assert [axis.dim_value for axis in x.type.tensor_type.shape.dim[1:]] == [3, 5, 4]


def test_its_weights_are_initialisers_by_their_plain_names(digits, digits_model):
    graph = onnx.load_model_from_string(inference_onnx(digits)).graph
    assert [value.name for value in graph.input] == ["x"]
    stored = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    for name, tensor in digits_model.state_dict().items():
        assert np.array_equal(stored[name], tensor.numpy())


def test_taking_it_needs_no_torch(digits, tmp_path):
    digits.write(tmp_path / "digits.edge")
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from edge_export import inference_onnx\n"
        "from edge_sdk.bundle import Bundle\n"
        "assert inference_onnx(Bundle.read(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "digits.edge")], check=True)
