"""docs/protocol.md and docs/protocol.schema.json say what the code does."""

import importlib
import inspect
import json
import re
from pathlib import Path

import msgspec
import pytest

from edge_sdk.protocol import decode_chunk, encode_chunk, messages, reference
from edge_sdk.protocol.messages import Key, Message, Ref
from edge_sdk.protocol.schema import document
from edge_server.config import RunConfig

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "protocol.md").read_text(encoding="utf-8")
TYPES = [
    kind
    for _, kind in inspect.getmembers(messages, inspect.isclass)
    if issubclass(kind, Message | Ref) and kind is not Message
]
NONE_SAID = "—"


def name_of(kind):
    return kind.__name__.lower()


def fields_of(kind):
    """The fields that a type adds to what it inherits."""
    inherited = Key.__struct_fields__ if issubclass(kind, Key) and kind is not Key else ()
    return {f.encode_name: f for f in msgspec.structs.fields(kind) if f.encode_name not in inherited}


def rows_under(heading):
    """The cells of the first table under a heading."""
    section = PAGE.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    table = section[section.index("\n|") + 1 :].split("\n\n")[0]
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return rows[2:]


def value_in_code(where):
    module, name = where.rsplit(".", 1)
    if module == "edge_server.config.RunConfig":
        return {f.name: f.default for f in msgspec.structs.fields(RunConfig)}[name]
    return getattr(importlib.import_module(module), name)


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
    assert {kind for _, kind, _ in examples()} == {name_of(t) for t in TYPES} - {"key", "ref"}


def test_the_example_of_a_chunk_is_what_the_code_makes():
    written = bytes.fromhex(re.search(r"```hex\n(.*?)```", PAGE, re.DOTALL).group(1))
    blob = decode_chunk(written).data
    assert encode_chunk(reference(blob), blob, 0) == written
