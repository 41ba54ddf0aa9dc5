"""Bundles that every test may use, exported once a session; torch is the oracle for what they train."""

import pytest
import torch
from torch import nn

from edge_export import DescriberSettings, export_bundle
from edge_export.models import make_cnn
from edge_export.pretrained import random_mobilenet_v2
from edge_sdk import Bundle
from edge_sdk.manifest import Input, Manifest, Parameter, Programs

SHAPE = (1, 8, 8)
CLASSES = 4

torch.set_num_threads(1)


class Norm(nn.Module):
    """The smallest network with BatchNorm: all three rules of aggregation in 195 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).flatten(1))


@pytest.fixture(scope="session")
def norm_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Norm()


@pytest.fixture(scope="session")
def norm(norm_model: nn.Module) -> Bundle:
    """A bundle with weights, running statistics and a counter."""
    return export_bundle(norm_model, SHAPE, classes=CLASSES, name="norm")


@pytest.fixture(scope="session")
def describing(norm_model: nn.Module) -> Bundle:
    """``norm`` with a small network of random weights that describes data."""
    settings = DescriberSettings(weights=random_mobilenet_v2(width=0.25), size=32, dims=16)
    return export_bundle(norm_model, SHAPE, name="describing", describe=settings)


@pytest.fixture(scope="session")
def cnn() -> Bundle:
    """A bundle of some 13,000 weights, without buffers."""
    return export_bundle(make_cnn(SHAPE, CLASSES), SHAPE, classes=CLASSES, name="cnn")


@pytest.fixture(scope="session")
def wide() -> Bundle:
    """A bundle with 1.1 MB of weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 4000), nn.ReLU(), nn.Linear(4000, CLASSES))
    return export_bundle(model, SHAPE, classes=CLASSES, name="wide")


@pytest.fixture(scope="session")
def paper() -> Bundle:
    """A bundle whose programs are no programs: for what never runs one."""
    state = {n: t.detach().numpy() for n, t in [*Norm().named_parameters(), *Norm().named_buffers()]}
    rules = {"running_mean": "statistic", "running_var": "statistic", "num_batches_tracked": "counter"}
    parameters = tuple(
        Parameter(name, array.shape, str(array.dtype), rules.get(name.split(".")[1], "mean"))
        for name, array in state.items()
    )
    manifest = Manifest(
        name="paper",
        input=Input(SHAPE, (0.0,), (1.0,)),
        classes=CLASSES,
        parameters=parameters,
        head=("head.weight", "head.bias"),
        feature_size=36,
        runtimes={"onnx": Programs("onnx/t", "onnx/e", "onnx/p", "onnx/m")},
        members={},
    )
    return Bundle.build(manifest, state, {f"onnx/{letter}": b"not a program" for letter in "tepm"})
