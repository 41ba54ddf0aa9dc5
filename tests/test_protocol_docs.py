"""docs/protocol.md and docs/protocol.schema.json say what the code does."""

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import msgspec
import numpy as np
import pytest

from edge_sdk.data import ArrayDataset
from edge_sdk.description import description_specs
from edge_sdk.features import Hashing
from edge_sdk.manifest import Input
from edge_sdk.protocol import decode_chunk, encode_chunk, messages, reference
from edge_sdk.protocol.messages import Augmentation, Fact, Key, Kind, Message, Ref
from edge_sdk.protocol.schema import document
from edge_sdk.statistics import Covariance, class_statistics, statistics_nbytes, statistics_specs
from edge_server.cohort import Cohort
from edge_server.config import RunConfig
from edge_server.descriptions import PLANNED, Describing, Descriptions
from edge_server.feature_statistics import FeatureStatistics
from edge_server.rounds import Assessment, TrainingRound
from edge_server.rows import RunRow

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "protocol.md").read_text(encoding="utf-8")
TYPES = [
    kind
    for _, kind in inspect.getmembers(messages, inspect.isclass)
    if issubclass(kind, Message | Ref | Augmentation) and kind is not Message
]
NO_MESSAGE = {"key", "ref", "augmentation"}
NONE_SAID = "—"


def name_of(kind):
    return kind.__name__.lower()


def fields_of(kind):
    """The fields that a type adds to what it inherits."""
    inherited = Key.__struct_fields__ if issubclass(kind, Key) and kind is not Key else ()
    return {f.encode_name: f for f in msgspec.structs.fields(kind) if f.encode_name not in inherited}


def rows_under(heading, number=0):
    """The cells of the first table under a heading, or of a later one."""
    section = PAGE.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    table = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[number]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return rows[2:]


def value_in_code(where):
    module, name = where.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        # A setting: its default.
        owner = value_in_code(module)
        fields = dataclasses.fields if dataclasses.is_dataclass(owner) else msgspec.structs.fields
        return {field.name: field.default for field in fields(owner)}[name]


def codes_in(cell):
    """What stands in a cell as code, the cell's own marks having been stripped."""
    return set(re.findall(r"\w+", cell.replace("`", " ").replace(",", " ")))


def test_the_committed_schema_is_the_one_made_from_the_types():
    assert (DOCS / "protocol.schema.json").read_text(encoding="utf-8") == document()


def test_the_schema_holds_every_message():
    assert {kind.__name__ for kind in TYPES} - {"Key"} <= set(json.loads(document())["$defs"])


@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_every_field_of_every_message_is_specified(kind):
    assert [row[0] for row in rows_under(f"### `{name_of(kind)}`") if row[0]] == list(fields_of(kind))


@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_a_field_is_optional_where_the_document_gives_a_default(kind):
    said = {row[0]: row[2] for row in rows_under(f"### `{name_of(kind)}`")}
    for name, field in fields_of(kind).items():
        default = NONE_SAID
        if not field.required:
            value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            default = json.dumps(list(value) if isinstance(value, tuple) else value)
        assert said[name] == default, name


@pytest.mark.parametrize("row", rows_under("## Constants"), ids=lambda row: row[3])
def test_a_constant_is_that_of_the_code(row):
    assert float(row[1].replace(",", "")) == value_in_code(row[3])


def test_the_default_bounds_are_those_of_the_code():
    line = re.search(r"^Default bounds: (.*)\.$", PAGE, re.MULTILINE).group(1)
    said = {rule: int(bound) for rule, bound in re.findall(r"`(\w+)` (\d+)", line)}
    assert said == RunConfig(fleet="f", rounds=1).precision(1).bounds


def examples():
    return re.findall(r"^(up|down|all)/(?:[a-z0-9-]+/)?([a-z]+) +(\{.*\})$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("direction", "kind", "text"), examples())
def test_an_example_of_a_message_is_valid(direction, kind, text):
    decode = messages.decode_from_device if direction == "up" else messages.decode_from_server
    assert set(json.loads(text)) <= set(json.loads(messages.encode(decode(kind, text.encode()))))


def test_every_message_has_an_example():
    assert {kind for _, kind, _ in examples()} == {name_of(t) for t in TYPES} - NO_MESSAGE


def test_a_task_of_every_kind_has_an_example():
    tasks = [json.loads(text) for _, kind, text in examples() if kind == "task"]
    assert {task["kind"] for task in tasks} == set(get_args(Kind))
    assert {tuple(task["model"].get("sources", ())) for task in tasks} == {(), ("ask",)}


def test_the_example_of_a_chunk_is_what_the_code_makes():
    written = bytes.fromhex(re.search(r"```hex\n(.*?)```", PAGE, re.DOTALL).group(1))
    blob = decode_chunk(written).data
    assert encode_chunk(reference(blob), blob, 0) == written


@pytest.mark.parametrize(("name", "type_"), [("kind", Kind), ("fact", Fact)])
def test_the_kinds_and_facts_are_those_of_the_code(name, type_):
    said = {row[0]: row[2] for row in rows_under("## Messages")}[name]
    assert codes_in(said) - {"or"} == set(get_args(type_))


def run_row(**settings):
    config = RunConfig(fleet="f", rounds=7, participants=1, **settings)
    return RunRow("a" * 32, "f", config, "", "", "", 7, ended=False, created=0.0)


def assignments(bundle):
    """One of each kind of work, the describing with and without a plan."""
    run = run_row(chain=2)
    training = TrainingRound.open(
        run_row(), bundle, Cohort(wanted=1, asked=1, order=["a"]), attempt=2, now=0.0
    )
    described = [Descriptions(config=run.config, bundle=bundle, plan=plan) for plan in ({}, {0: 2.0})]
    return [
        training,
        Assessment.open(training, ["a"], again=False, now=0.0),
        *(Describing.of(run, known, ["a"], now=0.0) for known in described),
        FeatureStatistics.of(run, bundle, ["a"], now=0.0),
    ]


def test_a_task_of_each_kind_has_the_fields_that_the_document_gives_it(paper):
    said = {row[0]: codes_in(row[5]) for row in rows_under("### `key`", 1)}
    assert said.keys() == set(get_args(Kind))
    for work in assignments(paper):
        assert set(work.details("a")) == said[work.kind], work.kind


def test_each_kind_has_the_key_that_the_document_gives_it(paper):
    said = {row[0]: row[3:5] for row in rows_under("### `key`", 1)}
    keys = [(work.kind, work.key.round, work.key.attempt) for work in assignments(paper)]
    assert keys == [
        ("train", 8, 2),
        ("evaluate", 8, 2),
        ("describe", 0, 0),
        ("describe", PLANNED, 0),
        ("statistics", 7, 0),
    ]
    assert said["describe"] == [f"0; {PLANNED} once there is a plan of augmentation", "0"]
    assert said["statistics"] == ["the last round", "0"]


def shape_of(cell, **sizes):
    return tuple(eval(cell.replace("·", "*").replace("/", "//"), {"__builtins__": {}}, sizes))


def test_the_tensors_of_a_description_are_those_of_the_code():
    manifest = SimpleNamespace(classes=4, describe=SimpleNamespace(dims=5, feature_size=6))
    rows = rows_under("### A description")
    said = [(row[0], shape_of(row[2], classes=4, dims=5, features=6), row[1]) for row in rows]
    specs = description_specs(get_args(Fact), manifest)
    assert said == [(spec.name, spec.shape, spec.dtype) for spec in specs]


@pytest.mark.parametrize("covariance", get_args(Covariance))
def test_the_tensors_of_statistics_are_those_of_the_code(covariance):
    rank = 3 if covariance == "low_rank" else 0
    said = {
        (row[0], shape_of(row[2], classes=4, d=5, rank=rank), row[1])
        for row in rows_under("### Statistics")
        if row[3] in ("any", covariance)
    }
    specs = statistics_specs(4, 5, covariance, rank)
    assert said == {(spec.name, spec.shape, spec.dtype) for spec in specs}


def test_the_example_of_a_hash_is_what_the_code_makes():
    text = re.search(r"For a = (.*), b = (.*), r = (.*):", PAGE)
    a, b, r = (np.array(json.loads(part.replace("−", "-")), np.float64) for part in text.groups())
    hashing = Hashing(a, b, float(r))
    for feature, descriptor in rows_under("### A description", 1):
        found = hashing.lsh(np.array(json.loads(feature), np.float64))
        assert found.tolist() == json.loads(descriptor), feature


def test_the_example_of_statistics_is_what_the_code_makes():
    manifest = SimpleNamespace(
        classes=1, backbone=None, feature_size=2, input=Input((1, 1, 2), (0.0,), (1.0,))
    )
    as_they_are = SimpleNamespace(embed=lambda x: x.reshape(-1, 2))
    data = ArrayDataset(np.float32([[[1, 0]], [[3, 4]]]), np.zeros(2, np.int64))
    count, mean, *scatters = rows_under("### Statistics", 1)[0]
    for covariance, said in zip(("full", "diagonal"), scatters, strict=True):
        made = class_statistics(as_they_are, manifest, data, np.arange(2), covariance=covariance)
        told = [made[name][0].tolist() for name in ("count", "mean", "scatter")]
        assert told == [json.loads(cell) for cell in (count, mean, said)]


def test_the_sizes_of_statistics_are_those_of_the_code():
    full, diagonal = re.search(r"are ([\d,]+) bytes as `full`, ([\d,]+) as `diagonal`", PAGE).groups()
    sizes = [statistics_nbytes(10, 1280, covariance) for covariance in ("full", "diagonal")]
    assert [int(text.replace(",", "")) for text in (full, diagonal)] == sizes


def test_every_link_within_the_document_leads_to_a_heading():
    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", PAGE)) <= anchors
