"""MobileNetV2 (Sandler et al., arXiv 1801.04381), with the state-dict keys of torchvision's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# Expansion of the channels, output channels, number of blocks, stride of the first: table 2 of the paper.
BLOCKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class MobileNetV2(nn.Module):
    """Depthwise separable convolutions with linear bottlenecks: 2.2 million weights at width 1.

    Use it to fine-tune features that were learnt on ImageNet, whose keys (``features.…``) are the usual
    ones, or to train from scratch where a device can afford it. ``features`` gives maps [B, F, H / 32,
    W / 32], which are averaged over their pixels; ``classifier`` is dropout and the linear head.

    Args:
        classes: number of logits.
        width: factor on all numbers of channels.
        dropout: before the head, 0.2 as published.
        channels: of the input, 3 for the published weights.
    """

    def __init__(
        self, classes: int = 10, width: float = 1.0, dropout: float = 0.2, channels: int = 3
    ) -> None:
        super().__init__()
        entering = divisible_by_8(32 * width)
        layers: list[nn.Module] = [_convolution(channels, entering, kernel=3, stride=2)]
        for expansion, base, repeats, stride in BLOCKS:
            leaving = divisible_by_8(base * width)
            for i in range(repeats):
                layers.append(InvertedResidual(entering, leaving, stride if i == 0 else 1, expansion))
                entering = leaving
        self.feature_size = divisible_by_8(1280 * max(1.0, width))
        layers.append(_convolution(entering, self.feature_size, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(self.feature_size, classes))
        self.apply(_initialise)

    @property
    def head(self) -> nn.Module:
        """The linear layer that gives the logits."""
        return self.classifier[1]

    def embed(self, x: Tensor) -> Tensor:
        """Features of images [B, C, H, W]: float32 [B, feature_size]."""
        return functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float32 [B, classes], of images [B, C, H, W]."""
        logits: Tensor = self.classifier(self.embed(x))
        return logits


class InvertedResidual(nn.Module):
    """Expand with 1x1, filter each channel with 3x3, project with 1x1; add the input where shapes agree."""

    def __init__(self, entering: int, leaving: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = entering * expansion
        self.residual = stride == 1 and entering == leaving
        expand = [_convolution(entering, hidden, kernel=1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *expand,
            _convolution(hidden, hidden, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, leaving, 1, bias=False),
            nn.BatchNorm2d(leaving),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, leaving, H / stride, W / stride] from maps [B, entering, H, W]."""
        projected: Tensor = self.conv(x)
        return x + projected if self.residual else projected


def divisible_by_8(channels: float) -> int:
    """The nearest multiple of 8, and not below 90 % of ``channels``.

    >>> divisible_by_8(32 * 0.35), divisible_by_8(24 * 0.5)
    (16, 16)
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def _convolution(entering: int, leaving: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(entering, leaving, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(leaving),
        nn.ReLU6(inplace=True),
    )


@torch.no_grad()
def _initialise(module: nn.Module) -> None:
    """He et al.'s normal weights by fan-out for convolutions, σ = 0.01 for the head, as published."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0, 0.01)
        nn.init.zeros_(module.bias)
