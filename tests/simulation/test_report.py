import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

import edge_simulation
from edge_sdk.errors import DataError
from edge_simulation.charts import Line, class_colour, line_chart, stacked_bars
from edge_simulation.report import Report, RoundResult, RunResult, summary, write_report

HOSTILE = '<script>alert("x")</script>'
VOID = {"meta", "br", "link", "img", "hr", "input"}


def run(label, *accuracies, loss=1.25):
    rounds = tuple(
        RoundResult(number, 0, accuracy, loss, 4, 400, 1_000_000, 500_000, 2.5)
        for number, accuracy in enumerate(accuracies, 1)
    )
    return RunResult(label, {"Momentum": label[6:] or "0"}, rounds, np.array([[417, 3], [29, 371]]))


REPORT = Report(
    title="A report & more",
    data_name="leaves",
    devices=3,
    alpha=0.5,
    seed=11,
    class_names=("oak", HOSTILE),
    histogram=np.array([[7, 0], [3, 4], [0, 7]]),
    runs=(run("FedAvg", 0.5, 0.612), run("FedAvgM", 0.55, 0.734)),
    device_names=("pi", "jetson", HOSTILE),
)


class Page(HTMLParser):
    """Collects tags and text, and fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, REPORT)
    return path.read_text()


def test_the_page_loads_nothing(html):
    page = Page(html)
    assert set(re.findall(r"https?://[^\s\"'<)]+", html)) <= {"http://www.w3.org/2000/svg"}
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href")]
    assert "url(" not in html
    assert "@import" not in html


def test_hostile_names_are_text(html):
    assert HOSTILE not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize(
    "figure",
    ["61.2", "73.4", "+12.2", "3 MB", "417", "371", "1.250", "seed 11", "α = 0.5", "21 examples"],
)
def test_the_figures_are_there(html, figure):
    assert figure in Page(html).text


def test_charts_and_tables_are_named_for_screen_readers(html):
    page = Page(html)
    charts = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(charts) == 4
    for chart in charts:
        root = ElementTree.fromstring(chart)
        assert root.get("role") == "img"
        assert {child.tag.rpartition("}")[2] for child in root} >= {"title", "desc"}
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") == 4


def test_the_same_report_gives_the_same_bytes(tmp_path, html):
    write_report(tmp_path / "again.html", REPORT)
    assert (tmp_path / "again.html").read_text() == html


@pytest.mark.parametrize(
    "runs",
    [
        (),
        (run("FedAvg"),),
        (run("FedAvg", 0.5),),
        (run("FedAvg", math.nan, loss=math.inf),),
        (run("FedAvg", 0.5), run("FedAvgM", 0.5, 0.5, 0.5), run("FedAdam", 0.0)),
    ],
)
def test_short_unequal_and_unmeasured_runs_are_drawn(tmp_path, runs):
    write_report(tmp_path / "report.html", replace(REPORT, runs=runs, alpha=math.inf))
    text = Page((tmp_path / "report.html").read_text()).text
    assert "IID" in text
    assert "nan" not in text.lower()


def test_many_classes_leave_the_matrices_out(tmp_path):
    names = tuple(f"class {number}" for number in range(100))
    rounds = replace(REPORT.runs[0], confusion=np.zeros((100, 100), int))
    report = replace(REPORT, class_names=names, histogram=np.ones((3, 100), int), runs=(rounds,))
    write_report(tmp_path / "report.html", report)
    assert "too large to be read" in (tmp_path / "report.html").read_text()


def test_the_summary_is_json_by_lower_cased_label():
    found = json.loads(json.dumps(summary(REPORT), allow_nan=False))
    assert found["seed"] == 11
    assert found["runs"]["fedavgm"]["final_accuracy"] == 0.734
    assert found["runs"]["fedavg"]["rounds"][1] == {
        "round": 2,
        "accuracy": 0.612,
        "loss": 1.25,
        "participants": 4,
        "bytes_up": 1_000_000,
        "bytes_down": 500_000,
        "seconds": 2.5,
    }


def test_what_was_not_measured_is_null():
    found = summary(replace(REPORT, runs=(run("FedAvg", math.nan),)))
    assert found["runs"]["fedavg"]["final_accuracy"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"histogram": np.zeros((2, 2), int)},
        {"device_names": ("pi",)},
        {"class_names": ("oak",)},
        {"runs": (replace(REPORT.runs[0], confusion=np.zeros((3, 3), int)),)},
    ],
)
def test_parts_that_do_not_fit_are_refused(wrong):
    with pytest.raises(DataError):
        replace(REPORT, **wrong)


def test_a_percentage_axis_stays_within_its_range():
    chart = line_chart([Line("a", [(1, 0.0), (2, 1.0)])], title="t", x_label="x", y_label="y", percent=True)
    assert "120%" not in chart
    assert "100%" in chart


def test_bars_are_as_high_as_their_counts():
    chart = stacked_bars(np.array([[3, 1], [0, 2]]), ("a", "b"), title="t")
    groups = re.findall(r'<g class="device">.*?</g>', chart)
    heights = [[float(h) for h in re.findall(r' height="([\d.]+)"', group)] for group in groups]
    assert heights == [[180, 60], [120]]


def test_classes_have_colours_of_their_own():
    assert len({class_colour(index) for index in range(40)}) == 40


def test_every_public_name_is_there():
    assert all(hasattr(edge_simulation, name) for name in edge_simulation.__all__)
