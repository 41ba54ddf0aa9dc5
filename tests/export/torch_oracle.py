"""PyTorch's own step as the oracle of the export's tests, and the nets and batches that they share."""

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional

Arrays = dict[str, np.ndarray]
Run = Callable[[bytes, Arrays], Arrays]


class Depthwise(nn.Module):
    """BatchNorm, depthwise and pointwise convolutions with strides, a residual branch, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.stem.weight.requires_grad_(False)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.SiLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16, affine=False),
            nn.SiLU(),
            nn.Conv2d(16, 8, 1),
        )
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x))
        return self.classifier(self.pool(self.down(x + self.block(x))).flatten(1))


def state_of(model: nn.Module) -> Arrays:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().numpy().copy() for name, tensor in named}


def feed_of(model: nn.Module, batch: Arrays) -> Arrays:
    """Everything that any program of ``model`` may take."""
    scalars = {"lr": np.float32(0.1), "weight_decay": np.float32(0)}
    ones = {"sample_weight": np.ones(len(batch["x"]), np.float32)}
    weights = {f"weights/{name}": value for name, value in state_of(model).items()}
    return {**weights, **{name: np.array(value) for name, value in {**scalars, **ones, **batch}.items()}}


def random_batch(shape: tuple[int, ...], classes: int, samples: int, seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    return {
        "x": generator.standard_normal((samples, *shape), np.float32),
        "y": generator.integers(classes, size=samples),
    }


def torch_step(
    model: nn.Module, batch: Arrays, dtype: torch.dtype, lr: float = 0.1, weight_decay: float = 0
) -> Arrays:
    """The state after one step of torch.optim.SGD, and the sum of the losses before it."""
    model = copy.deepcopy(model).to(dtype).train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trainable, lr=lr, weight_decay=weight_decay)
    loss = functional.cross_entropy(model(torch.tensor(batch["x"]).to(dtype)), torch.tensor(batch["y"]))
    loss.backward()
    optimiser.step()
    return {**state_of(model), "loss_sum": loss.detach().numpy() * len(batch["x"])}


def assert_steps_like_torch(result: Arrays, model: nn.Module, batch: Arrays, **options: float) -> None:
    """As near to PyTorch's float64 as PyTorch's float32 is, give or take a small factor."""
    exact = torch_step(model, batch, torch.float64, **options)
    single = torch_step(model, batch, torch.float32, **options)
    actual = {name: result[name if name == "loss_sum" else f"new/{name}"] for name in exact}
    for name, value in exact.items():
        magnitude = max(np.abs(value).max(), 1e-2)
        own = np.abs(single[name] - value).max()
        assert np.abs(actual[name] - value).max() <= 8 * own + 2e-6 * magnitude, name
