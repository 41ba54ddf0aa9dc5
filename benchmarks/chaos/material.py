"""What the fleets train: two bundles, and a share of toy images for each device."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_sdk.data import ArrayDataset

CLASSES = 4
WIDTH = {"small": 16, "wide": 7000}
"""Units of the hidden layer: 1,000 weights, or 1.1 MB of them, hundreds of chunks of 4 KiB."""


def write_bundles(folder: Path) -> None:
    """Export both into ``folder``. BatchNorm makes them have all three rules of aggregation."""
    import torch
    from torch import nn

    from edge_export import export_bundle

    for name, width in WIDTH.items():
        path = folder / f"{name}.edge"
        if path.exists():
            continue
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )
        export_bundle(net, (1, 8, 8), classes=CLASSES, name=name).write(path)


def shares(devices: int) -> dict[str, ArrayDataset]:
    """By device, its images: of each device another number, and two classes more often than the others."""
    return {f"d{number}": _share(number) for number in range(devices)}


def _share(number: int) -> ArrayDataset:
    rng = np.random.default_rng([7, number])
    favourites = [number % CLASSES, (number + 1) % CLASSES]
    labels = np.concatenate([rng.integers(CLASSES, size=8), rng.choice(favourites, size=16 + 4 * number)])
    images = rng.integers(90, size=(len(labels), 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 120
    return ArrayDataset(images, labels)
