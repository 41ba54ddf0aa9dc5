"""docs/privacy.md speaks of everything that can leave a device, and of nothing that there is not."""

import argparse
import dataclasses
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import msgspec
import numpy as np
import pytest

from edge_export.describe import DescriberSettings, draw_hash
from edge_sdk import EdgeClient
from edge_sdk.commands import DEVICE, FACTS
from edge_sdk.data import ArrayDataset
from edge_sdk.description import Sharing
from edge_sdk.features import Hashing
from edge_sdk.manifest import Input
from edge_sdk.protocol.messages import Fact
from edge_sdk.statistics import class_statistics, unpacked
from edge_server.commands import SERVE
from edge_server.config import RunConfig
from edge_server.privacy import epsilon
from edge_server.registry import HEARTBEAT

PAGE = (Path(__file__).parents[1] / "docs" / "privacy.md").read_text(encoding="utf-8")
SHARED = [field.name for field in dataclasses.fields(Sharing) if field.init]
NOISE = {"histogram_epsilon": 0.0, "statistics_noise": 0.0, "feature_norm": 0.0}


def section(heading):
    return PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def tables(text):
    """The rows of each table, as cells, without its head."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    cells = [[line.strip("|\n").split("|") for line in table.splitlines()[2:]] for table in found]
    return [[[cell.strip() for cell in row] for row in table] for table in cells]


@pytest.mark.parametrize("name", SHARED)
def test_what_an_app_may_share_is_described(name):
    assert re.search(rf"\*\*[\w :]*`{name}`" if name != "feature_norm" else "`feature_norm`", PAGE)


@pytest.mark.parametrize("fact", get_args(Fact))
def test_a_fact_that_a_run_may_want_can_be_consented_to_and_is_described(fact):
    assert fact in SHARED
    assert f"**`{fact}`" in PAGE


def test_what_leaves_the_device_by_consent_is_what_an_app_may_share():
    consents = [row[2] for row in tables(section("What leaves the device"))[0]]
    shared = re.findall(r"Sharing\((\w+)=True\)", " ".join(consents))
    assert shared == list(FACTS) == [name for name in SHARED if name not in {"withhold_below", *NOISE}]


def test_nothing_is_shared_by_default_and_classes_are_withheld_below_the_documented_bound():
    bound = int(re.search(r"\*\*`withhold_below`\*\*, (\d+) by default", PAGE).group(1))
    defaults = {name: getattr(Sharing(), name) for name in SHARED}
    assert defaults == dict.fromkeys(FACTS, False) | {"withhold_below": bound} | NOISE


@pytest.mark.parametrize("row", tables(section("What leaves the device"))[1], ids=lambda row: row[0])
def test_a_strategy_needs_what_the_document_says(row):
    settings = dict(re.findall(r"`(\w+) = (\S+)`", row[0]))
    config = RunConfig(fleet="f", rounds=1, **{name: json.loads(text) for name, text in settings.items()})
    needs = {*config.facts(), *(["statistics"] if config.calibration == "ccvr" else [])}
    assert set(re.findall(r"`(\w+)`", row[1])) == needs


def test_every_setting_that_is_named_with_a_value_can_have_it():
    for name, value in re.findall(r"`(\w+) = (\S+)`", PAGE):
        RunConfig(fleet="f", rounds=1, **{name: json.loads(value)}).check()


def test_every_name_is_one_of_the_code():
    settings = {field.name for field in msgspec.structs.fields(RunConfig)}
    options = set(inspect.signature(EdgeClient.__init__).parameters)
    statistics = {"count", "full", "low_rank", "diagonal", "num_batches_tracked"}
    known = {*settings, *options, *SHARED, *statistics, "a", "b", "r", "loss", "correct", "work_dir"}
    assert set(re.findall(r"`([a-z_]+)`", PAGE)) <= known


def test_the_command_of_the_document_is_understood():
    parser = argparse.ArgumentParser()
    DEVICE.configure(parser)
    given = re.search(r"edge-sdk device … (.*)", PAGE).group(1).split()
    options = parser.parse_args(["--broker=b", "--fleet=f", "--data=d", *given])
    assert (options.share, options.withhold_below) == (("histogram", "statistics"), 5)


def test_the_figures_of_a_description_are_the_defaults_of_the_export():
    assert f"({DescriberSettings().dims} of 1280 by default)" in PAGE
    assert f"({DescriberSettings().width:g} by default)" in PAGE
    assert f"heartbeat ({HEARTBEAT} s)" in PAGE


def test_an_integer_of_the_hash_bounds_the_projection_as_documented():
    rng = np.random.default_rng(5)
    hashing = Hashing(**{name: t if t.ndim else float(t) for name, t in draw_hash(9, 30, 3.0, 1).items()})
    for x in rng.normal(0, 4, (50, 30)):
        h, projected = hashing.lsh(x), hashing.a @ x
        assert (hashing.r * h - hashing.b <= projected + 1e-9).all()
        assert (projected - 1e-9 < hashing.r * (h + 1) - hashing.b).all()


def test_many_integers_give_the_feature_away_to_the_documented_error():
    features, dims = 20, 2000
    tensors = draw_hash(dims, features, 3.0, 1)
    hashing = Hashing(tensors["a"], tensors["b"], 3.0)
    errors = []
    for x in np.random.default_rng(6).normal(0, 4, (50, features)):
        middle = hashing.r * (hashing.lsh(x) + 0.5) - hashing.b
        errors.append(np.linalg.lstsq(hashing.a, middle, rcond=None)[0] - x)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(3 / np.sqrt(12 * dims), rel=0.1)


def test_two_samples_are_known_from_their_mean_and_scatter():
    first, second = np.random.default_rng(7).normal(size=(2, 6))
    mean, apart = (first + second) / 2, first - second
    scatter = sum(np.outer(x - mean, x - mean) for x in (first, second))
    np.testing.assert_allclose(scatter, np.outer(apart, apart) / 2)
    value, vector = (part[..., -1] for part in np.linalg.eigh(scatter))
    half = np.sqrt(value / 2) * vector
    found = sorted([(mean + half).tolist(), (mean - half).tolist()])
    np.testing.assert_allclose(found, sorted([first.tolist(), second.tolist()]))


def test_a_low_rank_scatter_of_a_few_samples_is_the_full_one():
    manifest = SimpleNamespace(
        classes=1, backbone=None, feature_size=9, input=Input((1, 3, 3), (0.0,), (1.0,))
    )
    as_they_are = SimpleNamespace(embed=lambda x: x.reshape(-1, 9))
    images = np.random.default_rng(8).normal(size=(5, 3, 3)).astype(np.float32)
    told = {
        covariance: class_statistics(
            as_they_are,
            manifest,
            ArrayDataset(images, np.zeros(5, np.int64)),
            np.arange(5),
            covariance=covariance,
            rank=rank,
        )
        for covariance, rank in (("full", 0), ("low_rank", 4))
    }
    factor = told["low_rank"]["factor"][0]
    np.testing.assert_allclose(factor.T @ factor, unpacked(told["full"]["scatter"][0], 9), atol=1e-12)


def test_the_command_that_adds_noise_is_understood():
    parser = argparse.ArgumentParser()
    SERVE.configure(parser)
    given = re.search(r"edge-sdk serve … (.*)", PAGE).group(1).split()
    options = parser.parse_args(given)
    settings = {
        name: getattr(options, name) for name in ("max_norm", "over_norm", "noise_multiplier", "delta")
    }
    assert RunConfig(fleet="f", rounds=1, **settings).check().noise_multiplier == 1


def test_the_budgets_of_statistics_are_those_of_the_accountant():
    stated = re.search(r"ε is ([\d.]+) at z = ([\d.]+), ([\d.]+) at (\d), ([\d.]+) at\s(\d)", PAGE).groups()
    for spent, multiplier in zip(stated[::2], stated[1::2], strict=True):
        assert float(spent) == pytest.approx(epsilon(float(multiplier), 1, delta=1e-5), abs=0.05)
