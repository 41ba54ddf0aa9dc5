"""Two small convolutional networks, and which to take for an image size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class _TwoConvolutions(nn.Module):
    """Two convolutions (16, 32 channels), each with ReLU and 2x2 max pooling; then 64 units."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int, kernel: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 16, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv2d(16, 32, kernel, padding=kernel // 2)
        self.hidden = nn.Linear(32 * (height // 4) * (width // 4), 64)
        self.head = nn.Linear(64, classes)

    def features(self, x: Tensor) -> Tensor:
        """What enters the head: float32 [B, 64] from images [B, C, H, W]."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        return functional.relu(self.hidden(x.flatten(1)))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, float32 [B, classes], of images [B, C, H, W]."""
        logits: Tensor = self.head(self.features(x))
        return logits


class DigitsCNN(_TwoConvolutions):
    """With 3x3 kernels, for small images: 13,706 weights for the 8 x 8 digits of scikit-learn.

    Args:
        channels: of the input.
        height: pixels, 4 or more.
        width: pixels, 4 or more.
        classes: number of logits.
    """

    def __init__(self, channels: int = 1, height: int = 8, width: int = 8, classes: int = 10) -> None:
        super().__init__((channels, height, width), classes, kernel=3)


class ImageCNN(_TwoConvolutions):
    """With 5x5 kernels, for 28 x 28 and 32 x 32 images: McMahan et al.'s CNN (arXiv 1602.05629), narrower.

    Args:
        channels: of the input.
        height: pixels, 4 or more.
        width: pixels, 4 or more.
        classes: number of logits.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__((channels, height, width), classes, kernel=5)


def make_cnn(input_shape: tuple[int, int, int], classes: int, seed: int = 0) -> nn.Module:
    """A :class:`DigitsCNN` for images below 16 pixels a side, an :class:`ImageCNN` for others.

    Args:
        input_shape: (C, H, W) of one image.
        classes: number of logits.
        seed: of the initial weights. The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = DigitsCNN if min(input_shape[1:]) < 16 else ImageCNN
        return kind(*input_shape, classes)
