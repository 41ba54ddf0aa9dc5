"""Training and describing through a pipeline; the oracle is PyTorch on images that are cut out by hand."""

import copy

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_oracle import state_of

from edge_export import Pipeline, export_bundle
from edge_export.describe import ONNX, DescriberSettings
from edge_export.models import CifarCNN, DigitsCNN
from edge_export.pretrained import IMAGENET, Pretrained, random_mobilenet_v2
from edge_sdk.bundle import Bundle
from edge_sdk.data import ArrayDataset
from edge_sdk.features import open_describer
from edge_sdk.runtime import Optimiser
from edge_sdk.runtime.onnx import OnnxRuntime
from edge_sdk.training import LocalTraining, evaluate, train

SEED, BATCH = 5, 6


@pytest.fixture(scope="module")
def images() -> ArrayDataset:
    rng = np.random.default_rng(0)
    return ArrayDataset(rng.integers(0, 256, (BATCH, 32, 32, 3)).astype(np.uint8), rng.integers(0, 10, BATCH))


@pytest.fixture(scope="module")
def cifar() -> tuple[nn.Module, Bundle]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CifarCNN()
    pipeline = Pipeline((32, 32), flip=True, standardise=True)
    return model, export_bundle(model, (3, 24, 24), pipeline=pipeline)


def cut(image: np.ndarray, top: int, left: int, mirrored: bool) -> torch.Tensor:
    """What enters the model of one image of bytes."""
    crop = image[top : top + 24, left : left + 24].transpose(2, 0, 1) / 255
    crop = crop[:, :, ::-1] if mirrored else crop
    return torch.tensor((crop - crop.mean()) / max(crop.std(), 1 / np.sqrt(24 * 24 * 3)))


def test_a_step_of_the_cifar_cnn_is_torchs_on_the_crops_that_the_seed_draws(cifar, images):
    model, bundle = cifar
    runtime = OnnxRuntime(bundle, threads=1)
    train(
        runtime, bundle.manifest, images, np.arange(BATCH), LocalTraining(1, BATCH, Optimiser(lr=0.1), SEED)
    )
    order = np.random.default_rng([SEED, 0]).permutation(BATCH)
    rng = np.random.default_rng([SEED, 0, 1])
    tops, lefts, chances = rng.integers(0, 9, BATCH), rng.integers(0, 9, BATCH), rng.random(BATCH)
    x = torch.stack(
        [
            cut(images.images[index], top, left, chance < 0.5)
            for index, top, left, chance in zip(order, tops, lefts, chances, strict=True)
        ]
    )
    reference = copy.deepcopy(model).double()
    functional.cross_entropy(reference(x), torch.tensor(images.labels[order])).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    for name, value in state_of(reference).items():
        np.testing.assert_allclose(runtime.get_weights()[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_it_is_evaluated_on_the_middle_of_each_image(cifar, images):
    model, bundle = cifar
    found = evaluate(OnnxRuntime(bundle, threads=1), bundle.manifest, images, np.arange(BATCH))
    x = torch.stack([cut(image, 4, 4, mirrored=False) for image in images.images]).float()
    with torch.no_grad():
        expected = functional.cross_entropy(model(x), torch.tensor(images.labels), reduction="sum")
    assert found.loss == pytest.approx(float(expected), rel=1e-4)


def test_what_is_described_is_the_whole_image():
    thin = Pretrained(random_mobilenet_v2(0, width=0.1).network, *IMAGENET)
    bundle = export_bundle(
        DigitsCNN(),
        (1, 8, 8),
        pipeline=Pipeline((12, 10), flip=True, standardise=True),
        describe=DescriberSettings(weights=thin, size=32),
    )
    (x,) = onnx.load_model_from_string(bundle.member(ONNX)).graph.input
    assert [axis.dim_value for axis in x.type.tensor_type.shape.dim[1:]] == [1, 12, 10]
    image = np.random.default_rng(0).random((1, 12, 10), np.float32)
    bordered = image.copy()
    bordered[:, 0] = 1 - bordered[:, 0]  # outside of the central crop
    describer = open_describer(bundle, threads=1)
    one, other = (
        describer.mean_feature(ArrayDataset(data, np.array([0])), np.arange(1)) for data in (image, bordered)
    )
    assert np.isfinite(one).all()
    assert (one != other).any()
