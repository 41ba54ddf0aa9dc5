"""Two small convolutional networks, and which to take for an image size."""

from __future__ import annotations

import torch
from torch import nn


class DigitsCNN(nn.Sequential):
    """For small images, the 8 x 8 digits of scikit-learn above all; 39,000 weights there.

    Two 3x3 convolutions (16, 32 channels), each with ReLU and 2x2 max pooling; then 64 units.

    Args:
        channels: of the input.
        height: pixels, 4 or more.
        width: pixels, 4 or more.
        classes: number of logits.
    """

    def __init__(self, channels: int = 1, height: int = 8, width: int = 8, classes: int = 10) -> None:
        super().__init__(*_layers((channels, height, width), classes, kernel=3))


class ImageCNN(nn.Sequential):
    """For 28 x 28 and 32 x 32 images; the CNN of McMahan et al. (arXiv 1602.05629), half as wide or less.

    Two 5x5 convolutions (16, 32 channels), each with ReLU and 2x2 max pooling; then 64 units.

    Args:
        channels: of the input.
        height: pixels, 4 or more.
        width: pixels, 4 or more.
        classes: number of logits.
    """

    def __init__(self, channels: int, height: int, width: int, classes: int) -> None:
        super().__init__(*_layers((channels, height, width), classes, kernel=5))


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


def _layers(input_shape: tuple[int, int, int], classes: int, kernel: int) -> list[nn.Module]:
    channels, height, width = input_shape
    return [
        nn.Conv2d(channels, 16, kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    ]
