"""The figures of :mod:`edge_server.diagnostics` as charts, SVG text each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_sdk.tensors import Array
from edge_server.diagnostics import chance_purity, correlation, group_purity
from edge_simulation.charts import Line, Point, heatmap, line_chart, scatter


def plot_cka(matrix: Array, model_names: Sequence[str], *, layer: str) -> str:
    """``matrix`` of :func:`edge_server.diagnostics.cka_matrix` for one layer: dark where models agree."""
    return heatmap(
        matrix,
        model_names,
        model_names,
        title=f"Linear CKA between local models, {layer}",
        x_label=f"{layer}: mean off the diagonal {_off_diagonal(matrix):.3f}",
        y_label="local model",
        top=1.0,
    )


def plot_head_norms(norms: Array, counts: Array, class_names: Sequence[str]) -> str:
    """Each class's ``norms`` in the last layer against its ``counts``: level where nothing is biased."""
    named = zip(class_names, counts.tolist(), norms.tolist(), strict=True)
    return scatter(
        [Point(name, count, norm) for name, count, norm in named],
        title="Classifier weight norm against class count",
        x_label=f"examples of the class (correlation {correlation(counts, norms):+.2f})",
        y_label="weight norm",
    )


def plot_divergences(devices: Array, mediators: Array) -> str:
    """KL to uniform of devices alone and of ``mediators``, each sorted: the lower the better balanced."""
    curves = (("devices", devices), ("mediators", mediators))
    return line_chart(
        [
            Line(name, [((i + 0.5) / len(found), value) for i, value in enumerate(np.sort(found).tolist())])
            for name, found in curves
        ],
        title="Imbalance of labels before and after mediators",
        x_label="share of devices, of mediators",
        y_label="KL divergence to uniform, nats",
    )


def plot_purity(composition: Array, label_names: Sequence[str]) -> str:
    """Devices of each group by label: one dark square a row where groups are pure."""
    pure, chance = group_purity(composition), chance_purity(composition)
    return heatmap(
        composition,
        [f"group {number}" for number in range(len(composition))],
        label_names,
        title="Labels of the devices in each group",
        x_label=f"label (purity {pure:.0%}, {chance:.0%} by chance)",
        y_label="devices",
    )


def _off_diagonal(matrix: Array) -> float:
    pairs = matrix[~np.eye(len(matrix), dtype=bool)]
    return float(pairs.mean()) if len(pairs) else 1.0
