"""The paper's upper bound: real features, from data that no server has in earnest."""

from __future__ import annotations

import numpy as np

from edge_sdk.data import Dataset
from edge_sdk.errors import DataError
from edge_sdk.examples import in_order
from edge_sdk.manifest import Manifest
from edge_sdk.runtime import Runtime
from edge_sdk.tensors import Array


def real_features(
    runtime: Runtime, manifest: Manifest, dataset: Dataset, *, fraction: float = 1.0, seed: int = 0
) -> tuple[Array, Array]:
    """Features of a share of ``dataset`` with the runtime's weights (arXiv 2106.05001, section 3.3).

    Feed them to :func:`edge_server.calibration.retrain`: without this a bad extractor cannot be told from a
    bad calibration. It needs the devices' data in one place, so it is for simulations.

    Args:
        runtime: holds the global weights.
        manifest: of the runtime's bundle.
        dataset: all devices' data.
        fraction: of the examples, drawn uniformly, at least one; the paper takes 1 and 1/50.
        seed: of the draw; not negative.

    Returns:
        Features float32 ``[n, d]`` and labels int64 ``[n]``.

    Raises:
        DataError: ``fraction`` is not in (0, 1], or an example does not fit the model.
    """
    if not 0 < fraction <= 1:
        raise DataError(f"a fraction of {fraction} of the real features: give one in (0, 1]")
    chosen = np.arange(len(dataset))
    if fraction < 1:
        size = max(1, round(fraction * len(dataset)))
        chosen = np.sort(np.random.default_rng(seed).choice(len(dataset), size, replace=False))
    if not len(chosen):
        raise DataError("the data set is empty: give at least one (image, label) example")
    parts = [(runtime.embed(x), y) for x, y in in_order(runtime, manifest, dataset, chosen)]
    features, labels = zip(*parts, strict=True)
    return np.concatenate(features), np.concatenate(labels)
