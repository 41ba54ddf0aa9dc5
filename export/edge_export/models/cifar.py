"""The CNN of the papers on federated CIFAR-10, and the narrower variant that our figures are measured on."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class CifarCNN(nn.Module):
    """The CNN of McMahan et al. (arXiv 1602.05629) and Hsu et al. (arXiv 1909.06335).

    It is that of TensorFlow's tutorial. Two 5x5 convolutions of 64 channels, each with overlapping 3x3
    pooling of stride 2 and local response normalisation (after the pool in the first, before it in the
    second), then 384 and 192 units. The papers feed it 24 x 24 crops of 32 x 32 images, mirrored and
    standardised: ``Pipeline((32, 32), flip=True, standardise=True)`` of :mod:`edge_sdk.manifest`.

    Args:
        classes: number of logits.
        channels: of the input.
        size: pixels a side, 24 in the papers.
    """

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 24) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 5, padding=2)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        side = (size + 3) // 4  # two halvings, each rounded up
        self.hidden1 = nn.Linear(64 * side * side, 384)
        self.hidden2 = nn.Linear(384, 192)
        self.head = nn.Linear(192, classes)
        _initialise(self.conv1, 0.05, 0.0)
        _initialise(self.conv2, 0.05, 0.1)
        _initialise(self.hidden1, 0.04, 0.1)
        _initialise(self.hidden2, 0.04, 0.1)
        _initialise(self.head, 1 / 192, 0.0)

    def features(self, x: Tensor) -> Tensor:
        """What enters the head: float32 [B, 192] from images [B, C, size, size]."""
        x = _normalise(functional.max_pool2d(functional.relu(self.conv1(x)), 3, 2, padding=1))
        x = functional.max_pool2d(_normalise(functional.relu(self.conv2(x))), 3, 2, padding=1)
        return functional.relu(self.hidden2(functional.relu(self.hidden1(x.flatten(1)))))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float32 [B, classes], of images [B, C, size, size]."""
        logits: Tensor = self.head(self.features(x))
        return logits


class WideCNN(nn.Module):
    """5x5 convolutions of 32 and 64 channels with 2x2 pooling, and 512 units: what ours is timed on.

    Args:
        classes: number of logits.
        channels: of the input.
        size: pixels a side, a multiple of 4.
    """

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.hidden = nn.Linear(64 * (size // 4) ** 2, 512)
        self.head = nn.Linear(512, classes)

    def features(self, x: Tensor) -> Tensor:
        """What enters the head: float32 [B, 512] from images [B, C, size, size]."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return functional.relu(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float32 [B, classes], of images [B, C, size, size]."""
        logits: Tensor = self.head(self.features(x))
        return logits


def _initialise(layer: nn.Conv2d | nn.Linear, deviation: float, bias: float) -> None:
    nn.init.trunc_normal_(layer.weight, 0, deviation, -2 * deviation, 2 * deviation)
    assert layer.bias is not None
    nn.init.constant_(layer.bias, bias)


def _normalise(x: Tensor) -> Tensor:
    # TensorFlow's lrn(4, bias=1, alpha=0.001 / 9, beta=0.75): 4 channels to each side, and an alpha that
    # PyTorch divides by the 9 channels of the window.
    return functional.local_response_norm(x, 9, alpha=0.001, beta=0.75, k=1.0)
