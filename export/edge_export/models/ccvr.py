"""The CNN of the experiments on classifier calibration (Luo et al., arXiv 2106.05001)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class CcvrCNN(nn.Module):
    """Seven layers: LeNet-5's four, a projection of two, and the classifier.

    5x5 convolutions of 6 and 16 channels without padding, each with ReLU and 2x2 pooling; 120 and 84
    units; a projection of 84 and 256 units, as in MOON (Li et al., arXiv 2103.16257); the classifier.

    Args:
        classes: number of logits.
        channels: of the input.
        size: pixels a side, 16 or more; 32 in the papers.
    """

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        side = ((size - 4) // 2 - 4) // 2
        self.hidden1 = nn.Linear(16 * side * side, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.projection1 = nn.Linear(84, 84)
        self.projection2 = nn.Linear(84, 256)
        self.head = nn.Linear(256, classes)

    def features(self, x: Tensor) -> Tensor:
        """What enters the head: float32 [B, 256] from images [B, C, size, size]."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.hidden1(x.flatten(1)))
        x = functional.relu(self.hidden2(x))
        projected: Tensor = self.projection2(functional.relu(self.projection1(x)))
        return projected

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float32 [B, classes], of images [B, C, size, size]."""
        logits: Tensor = self.head(self.features(x))
        return logits
