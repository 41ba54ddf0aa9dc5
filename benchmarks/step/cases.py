"""The models that are timed, and Fashion-MNIST for their losses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
DATA = Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))


@dataclass(frozen=True)
class Case:
    """One model: how it is made, the shape of what enters it, the batch, timed steps in a process.

    ``settles``: steps until rounding no longer decides where training goes, if at first it does.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    batch: int
    steps: int
    head_only: str | None = None
    settles: int = 0

    @property
    def images(self) -> tuple[int, int, int]:
        """The shape of an image, which enters a frozen backbone where a head alone is trained."""
        return (3, 32, 32) if self.head_only else self.shape  # type: ignore[return-value]


def cnn() -> Any:
    from edge_export.models import WideCNN

    return WideCNN()


def bn_dw() -> Any:
    """BatchNorm, ReLU6, depthwise and 1x1 convolutions on large maps: MobileNet's first half, wider."""
    from torch import nn

    def block(entering: int, leaving: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Module:
        convolution = nn.Conv2d(entering, leaving, kernel, stride, kernel // 2, groups=groups, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(leaving), nn.ReLU6())

    return nn.Sequential(
        block(3, 32, 3),
        *(block(32, 32, 3, groups=32), block(32, 64, 1)),
        *(block(64, 64, 3, stride=2, groups=64), block(64, 128, 1)),
        *(block(128, 128, 3, groups=128), block(128, 128, 1)),
        *(block(128, 128, 3, stride=2, groups=128), block(128, 256, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)),
    )


def mobilenet_v2() -> Any:
    from edge_export.models import MobileNetV2

    # Without dropout: the runtimes would draw different masks.
    return MobileNetV2(dropout=0.0)


def cnn_and_mlp() -> Any:
    """A backbone of two convolutions, and as the head what is behind them in the CNN."""
    from collections import OrderedDict

    from torch import nn

    backbone = nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    )
    head = nn.Sequential(nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10))
    return nn.Sequential(OrderedDict(backbone=backbone, head=head))


CASES = {
    "cnn": Case(cnn, (3, 32, 32), 50, 20),
    "bn_dw": Case(bn_dw, (3, 32, 32), 32, 12),
    "mobilenet_v2_32": Case(mobilenet_v2, (3, 32, 32), 32, 12, settles=1000),
    "mobilenet_v2_96": Case(mobilenet_v2, (3, 96, 96), 16, 8, settles=1000),
    "head": Case(cnn_and_mlp, (4096,), 50, 60, head_only="head"),
}


def whole_model(name: str) -> Any:
    """The case's model, from a fixed seed."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    return CASES[name].make()


def make_model(name: str) -> Any:
    """The part of it that trains."""
    model, part = whole_model(name), CASES[name].head_only
    return model.get_submodule(part) if part else model


def batches(case: Case, count: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of Fashion-MNIST as three equal channels, enlarged by repetition or padded to the size.

    For a head, features of them: a random projection of their pixels, cut off at 0.
    """
    from edge_sdk.data import load

    dataset: Any = load(DATA)
    images, labels = dataset.images, dataset.labels
    generator = np.random.default_rng(seed)
    projection = np.random.default_rng(1).standard_normal((784, case.shape[0])) / 28
    for _ in range(count):
        chosen = generator.choice(len(labels), case.batch, replace=False)
        x = images[chosen].astype(np.float32).reshape(-1, 1, 28, 28) / 255
        x = (x - 0.286) / 0.353
        if case.head_only:
            x = np.maximum(x.reshape(case.batch, -1) @ projection, 0).astype(np.float32)
        else:
            times = case.shape[1] // 32
            x = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2))).repeat(times, 2).repeat(times, 3).repeat(3, 1)
        yield np.ascontiguousarray(x), labels[chosen].astype(np.int64)
