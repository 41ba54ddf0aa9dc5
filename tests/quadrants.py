"""Images that a small network learns at once: class c lights up quadrant c of 8 x 8 pixels."""

import numpy as np

from edge_sdk import ArrayDataset


def quadrants(count: int, seed: int = 0) -> ArrayDataset:
    """``count`` noisy images uint8 [N, 8, 8] of four classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(4, size=count)
    images = rng.integers(90, size=(count, 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        row, column = divmod(int(label), 2)
        image[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 120
    return ArrayDataset(images, labels)
