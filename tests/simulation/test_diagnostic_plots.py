"""Charts of diagnostics, and features of inner layers against PyTorch called by hand."""

import copy
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.errors import DataError, TensorError
from edge_server.diagnostics import linear_cka
from edge_simulation.charts import Point, heatmap, scatter
from edge_simulation.diagnostic_plots import plot_cka, plot_divergences, plot_head_norms, plot_purity
from edge_simulation.layers import layer_cka

HOSTILE = '<script>alert("x")</script>'
PLOTS = {
    "cka": lambda: plot_cka(np.array([[1, 0.25], [0.25, 1]]), ("a", HOSTILE), layer=HOSTILE),
    "norms": lambda: plot_head_norms(np.array([1.0, 2.0]), np.array([10, 20]), ("a", HOSTILE)),
    "divergences": lambda: plot_divergences(np.array([0.9, 0.4, 0.5]), np.array([0.1])),
    "purity": lambda: plot_purity(np.array([[3, 0], [1, 2]]), ("a", HOSTILE)),
}


def texts(chart, tag="text"):
    return [element.text for element in ElementTree.fromstring(chart).iter() if element.tag.endswith(tag)]


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
def test_a_chart_is_named_for_screen_readers_and_holds_no_markup_of_others(plot):
    chart = plot()
    root = ElementTree.fromstring(chart)
    assert root.get("role") == "img"
    assert [child.tag.rpartition("}")[2] for child in root][:2] == ["title", "desc"]
    assert "<script" not in chart
    assert "nan" not in chart.lower()


def test_a_cell_is_as_dark_as_its_value_is_of_the_top():
    chart = heatmap(
        np.array([[0.0, 0.5], [2.0, math.nan]]), "ab", "cd", title="t", x_label="x", y_label="y", top=1.0
    )
    assert [float(o) for o in re.findall(r'fill-opacity="([\d.]+)"', chart)] == [0, 0.5, 1, 0]
    assert [t for t in texts(chart, "title") if ":" not in t] == ["t"]
    assert "b, d: not measured" in texts(chart, "title")


def test_the_largest_value_is_the_darkest_by_default():
    chart = heatmap(np.array([[1, 4]]), "a", "cd", title="t", x_label="x", y_label="y")
    assert re.findall(r'fill-opacity="([\d.]+)"', chart) == ["0.250", "1.000"]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (1, 1), (3, 60), (100, 100)])
def test_a_matrix_of_any_size_is_drawn_within_its_frame(shape):
    names = [[f"name {i}" for i in range(count)] for count in shape]
    root = ElementTree.fromstring(heatmap(np.ones(shape), *names, title="t", x_label="x", y_label="y"))
    cells = [e for e in root.iter() if e.tag.endswith("rect")]
    _, _, width, height = map(float, root.get("viewBox").split())
    assert len(cells) == shape[0] * shape[1]
    assert all(float(c.get("x")) + float(c.get("width")) <= width + 0.1 for c in cells)
    assert all(float(c.get("y")) + float(c.get("height")) <= height for c in cells)


def test_marks_lie_where_their_values_are():
    chart = scatter(
        [Point("low", 0, 0), Point("middle", 5, 1), Point("high", 10, 2), Point("no", math.nan, 1)],
        title="t",
        x_label="x",
        y_label="y",
    )
    marks = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', chart)]
    (x0, y0), (x1, y1), (x2, y2) = marks
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x0 < x2
    assert y0 > y2


@pytest.mark.parametrize("points", [[], [Point("a", 3, 3)], [Point("a", math.inf, 0)]])
def test_few_or_no_marks_are_drawn(points):
    chart = scatter(points, title="t", x_label="x", y_label="y")
    assert "nan" not in chart
    assert "inf" not in chart


def test_the_figures_stand_in_the_charts():
    assert "0.25" in texts(PLOTS["cka"]())
    assert any("correlation +1.00" in text for text in texts(PLOTS["norms"]()))
    assert any(text.startswith("label (purity 83%, ") for text in texts(PLOTS["purity"]()))
    assert "devices ends at 0.9; mediators ends at 0.1" in texts(PLOTS["divergences"](), "desc")[0]


class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(108, 4)

    def forward(self, x):
        return self.head(self.relu(self.norm(self.conv(x))).flatten(1))


@pytest.fixture
def two():
    torch.manual_seed(5)
    models = [Inplace(), Inplace()]
    named = [[*m.named_parameters(), *m.named_buffers()] for m in models]
    return models, [{name: t.detach().numpy().copy() for name, t in each} for each in named]


IMAGES = np.random.default_rng(6).standard_normal((50, 1, 8, 8)).astype(np.float32)


def test_inner_layers_are_compared_by_what_they_give_out(two):
    models, weights = two
    found = layer_cka(models[0], weights, IMAGES, layers=["conv", "norm", "head"])
    x = torch.from_numpy(IMAGES)
    with torch.no_grad():
        convs = [model.eval().conv(x).numpy() for model in models]
        norms = [model.norm(model.conv(x)).numpy() for model in models]
        logits = [model(x).numpy() for model in models]
    for layer, pair in (("conv", convs), ("norm", norms), ("head", logits)):
        assert found[layer][0, 1] == pytest.approx(linear_cka(*pair), rel=1e-5)


def test_the_model_is_left_as_it_was(two):
    (model, _), weights = two
    before = copy.deepcopy(model.state_dict())
    layer_cka(model, weights[::-1], IMAGES, layers=["conv"])
    assert model.training
    assert not model.conv._forward_hooks
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("layer", "message"), [("con", "no layer 'con': it has"), ("unused", "not run")])
def test_a_layer_that_is_not_there_or_does_not_run_is_refused(two, layer, message):
    models, weights = two
    with pytest.raises(DataError, match=message):
        layer_cka(models[0], weights, IMAGES, layers=[layer])


def test_weights_of_another_model_are_refused(two):
    models, weights = two
    with pytest.raises(TensorError, match=r"head\.bias"):
        layer_cka(models[0], [{n: w for n, w in weights[0].items() if n != "head.bias"}], IMAGES, layers=[])
