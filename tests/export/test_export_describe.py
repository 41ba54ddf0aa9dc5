"""The describe program; the oracle is PyTorch on images that it resizes and normalises by itself."""

import copy

import numpy as np
import onnx
import pytest
import torch
from scipy.stats import norm
from torch import nn
from torch.nn import functional
from torch_oracle import Run

from edge_export import ExportError, export_bundle
from edge_export.describe import ONNX, DescriberSettings, describe_members, draw_hash, program
from edge_export.models import DigitsCNN
from edge_export.onnx import lower
from edge_export.pretrained import IMAGENET, Pretrained, random_mobilenet_v2
from edge_sdk.bundle import Bundle
from edge_sdk.data import ArrayDataset
from edge_sdk.features import Hashing, open_describer

SHAPES = {"grey, growing": (1, 28, 20), "colour, shrinking": (3, 50, 41)}


@pytest.fixture(scope="module")
def thin() -> Pretrained:
    """MobileNetV2 at a tenth of its width, with statistics and shifts that are not those of a new net."""
    network = random_mobilenet_v2(0, width=0.1).network
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.bias, -0.3, 0.3)
                nn.init.uniform_(module.weight, 0.7, 1.3)
    return Pretrained(network, *IMAGENET)


@pytest.fixture(scope="module", params=SHAPES)
def described(request, thin) -> tuple[tuple[int, int, int], bytes]:
    shape = SHAPES[request.param]
    return shape, lower(program(thin, shape, 40))


def in_torch(pretrained: Pretrained, images: torch.Tensor, size: int) -> np.ndarray:
    colour = images.double().expand(-1, 3, -1, -1)
    resized = functional.interpolate(colour, size=(size, size), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (pretrained.mean, pretrained.std))
    normalised = (resized - mean[:, None, None]) / std[:, None, None]
    with torch.no_grad():
        return copy.deepcopy(pretrained.network).double().eval().embed(normalised).numpy()


@pytest.mark.parametrize("samples", [1, 5])
def test_features_are_pytorchs_for_images_as_the_data_set_has_them(described, thin, samples, run: Run):
    shape, data = described
    images = np.random.default_rng(0).random((samples, *shape), np.float32)
    found = run(data, {"x": images})["features"]
    expected = in_torch(thin, torch.tensor(images), 40)
    assert found.shape == (samples, 1280)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_it_is_of_standard_operators_with_its_weights_inside(described):
    model = onnx.load_model_from_string(described[1])
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, model.opset_import[0].version) == (10, 18)
    assert {(node.domain, node.op_type) for node in model.graph.node} <= {
        ("", op)
        for op in ("Add", "Clip", "Conv", "MatMul", "Mul", "ReduceMean", "Reshape", "Sub", "Transpose")
    }
    assert [value.name for value in model.graph.input] == ["x"]
    assert [value.name for value in model.graph.output] == ["features"]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert not model.graph.value_info


@pytest.fixture(scope="module")
def settings(thin) -> DescriberSettings:
    return DescriberSettings(weights=thin, dims=6, size=32, width=0.05, seed=7)


@pytest.fixture(scope="module")
def bundle(settings) -> Bundle:
    return export_bundle(DigitsCNN(), (1, 8, 8), mean=[0.3], std=[0.4], describe=settings)


def test_a_device_finds_the_hash_of_pytorchs_mean_feature(bundle, thin, tmp_path):
    bundle.write(tmp_path / "b.edge")
    data = ArrayDataset(np.random.default_rng(1).integers(0, 256, (9, 8, 8), np.uint8), np.zeros(9, np.int64))
    found = open_describer(Bundle.read(tmp_path / "b.edge")).descriptor(data, np.arange(9))
    mean = in_torch(thin, torch.tensor(data.images[:, None]) / 255, 32).mean(0)
    generator = np.random.default_rng(7)
    a, b = generator.standard_normal((6, 1280)), generator.random(6) * 0.05
    assert found.tolist() == np.floor((a @ mean + b) / 0.05).tolist()


def test_the_same_settings_give_the_describer_that_the_bundle_holds(bundle, settings):
    describe, members = describe_members(settings, (1, 8, 8))
    assert describe == bundle.manifest.describe
    assert members == {name: bundle.member(name) for name in (describe.lsh, *describe.programs.values())}


def test_points_collide_as_often_as_datar_et_al_say():
    # Their equation for p(c) with Gaussian projections, integrated for a bucket of width r.
    tensors = draw_hash(20_000, 3, 3.0, seed=5)
    hashing = Hashing(tensors["a"], tensors["b"], float(tensors["r"]))
    origin = hashing.lsh(np.zeros(3))
    for distance in (0.5, 3.0, 9.0):
        t = 3.0 / distance
        chance = 1 - 2 * norm.cdf(-t) - 2 / (np.sqrt(2 * np.pi) * t) * (1 - np.exp(-(t**2) / 2))
        met = (hashing.lsh(np.array([0.0, -distance, 0.0])) == origin).mean()
        assert met == pytest.approx(chance, abs=0.015)


def test_the_offsets_lie_within_a_bucket():
    b = draw_hash(5_000, 1, 0.5, seed=0)["b"]
    assert 0 <= b.min() < 0.01
    assert 0.49 < b.max() < 0.5


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"dims": 0}, (1, 8, 8), "1 to 4096 dimensions"),
        ({"dims": 5000}, (1, 8, 8), "1 to 4096 dimensions"),
        ({"size": 16}, (1, 8, 8), "32 to 512 pixels"),
        ({"width": 0.0}, (1, 8, 8), "width 0.0"),
        ({"width": float("nan")}, (1, 8, 8), "width nan"),
        ({"seed": -1}, (1, 8, 8), "seed -1"),
        ({}, (4, 8, 8), "4 channels"),
        ({"weights": "none.safetensors"}, (1, 8, 8), "none.safetensors: cannot be read"),
    ],
)
def test_a_describer_that_cannot_be_is_refused(thin, settings, shape, message):
    with pytest.raises(ExportError, match=message):
        describe_members(DescriberSettings(**{"weights": thin, **settings}), shape)


def test_a_program_that_differs_from_pytorch_is_not_exported(thin):
    broken = copy.deepcopy(thin.network)
    broken.features[18][0].weight.data[3] = torch.nan
    with pytest.raises(ExportError, match="other features than PyTorch"):
        describe_members(DescriberSettings(weights=Pretrained(broken, *IMAGENET), size=32), (1, 8, 8))


def test_nothing_is_left_of_the_members_without_a_describer(digits):
    assert digits.manifest.describe is None
    assert ONNX not in digits.manifest.members
