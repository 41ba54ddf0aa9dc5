"""Mutations of honest input: of its bytes, or of what is inside a container that stays sound."""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any, TypeAlias

Draw: TypeAlias = random.Random
"""Where the choices come from: a seed, or hypothesis."""
Mutation: TypeAlias = Callable[[Draw, bytes], bytes]

LARGEST = 1 << 18
_WHOLE = [0, 1, 2, 7, 8, 127, 128, 255, 256, 1023, 1024, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
_WHOLE += [1 << 32, 1 << 53, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
_TEXTS = [
    b"",
    b"-1",
    b"0",
    b"1e999",
    b"1e-999",
    b"NaN",
    b"inf",
    b"nan",
    b"-inf",
    b"null",
    b"true",
    b"[]",
    b"{}",
]
_TEXTS += [
    b"9" * 30,
    b"9" * 5000,
    b"0.1",
    b'"',
    b"\\",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"\n",
    b"../",
    b"$",
    b"'''",
]
_TEXTS += [b"[" * 3000, b'{"a":' * 2000, b"18446744073709551616", b"1979-05-27T07:32:00Z", b"0x10", b"1_0"]
_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    1 << 31,
    1 << 53,
    1 << 63,
    1 << 64,
    10**40,
    0.5,
    -0.0,
    1e308,
]
_VALUES += [
    "",
    "a",
    "0",
    "../x",
    "\0",
    "\ud7ff",
    "x" * 501,
    "f" * 64,
    [],
    {},
    [[]],
    [0],
    [1 << 31, 1 << 31],
    {"a": 0},
]
_VALUES += [
    "float32",
    "int64",
    "float16",
    "mean",
    "counter",
    "F32",
    "I64",
    "F64",
    "U8",
    "BOOL",
    [-1],
    [1 << 62, 4],
]
_FLOATS = [
    float("nan"),
    float("inf"),
    float("-inf"),
    -1.0,
    -0.0,
    5e-324,
    1e-300,
    1e300,
    1.7e308,
    3.5e38,
    2.0**53,
]


def mutated(draw: Draw, data: bytes, other: bytes = b"") -> bytes:
    """One to four mutations of the bytes; ``other`` is what may be spliced in."""
    for _ in range(draw.randint(1, 4)):
        data = draw.choice(_BYTES)(draw, data, other)
    return data[:LARGEST]


def mutated_json(draw: Draw, data: bytes) -> bytes:
    """A document with one value replaced, left out, renamed, doubled or nested; not JSON: mutated bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutated(draw, data)
    for _ in range(draw.randint(1, 3)):
        document = _changed(draw, document)
    return json.dumps(document, separators=(",", ":"), ensure_ascii=draw.random() < 0.5).encode(
        "utf-8", "surrogatepass"
    )


def mutated_safetensors(draw: Draw, data: bytes) -> bytes:
    """A file whose header is JSON of the right length, or whose values are special floats or integers."""
    if len(data) < 8:
        return mutated(draw, data)
    (length,) = struct.unpack("<Q", data[:8])
    header, values = data[8 : 8 + length], bytearray(data[8 + length :])
    if draw.random() < 0.4:
        header = mutated_json(draw, header.rstrip(b" "))
        header += b" " * (-len(header) % 8)
    for _ in range(draw.randint(0, 3)):
        if len(values) >= 8:
            _place_number(draw, values)
    return struct.pack("<Q", len(header)) + header + bytes(values)


METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def zip_of(members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    """A zip with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, kind)
    return buffer.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    """The members of an honest zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def mutated_bundle(draw: Draw, data: bytes) -> bytes:
    """A bundle with one member mutated, which the manifest describes as it is."""
    members = members_of(data)
    name = draw.choice(sorted(members))
    if name == "manifest.json":
        members[name] = mutated_json(draw, members[name])
        return zip_of(members)
    change: Mutation = mutated_safetensors if "onnx" not in name else mutated
    members[name] = change(draw, members[name])
    manifest = json.loads(members["manifest.json"])
    digest = hashlib.sha256(members[name]).hexdigest()
    manifest["members"][name] = {"size": len(members[name]), "sha256": digest}
    members["manifest.json"] = json.dumps(manifest).encode()
    return zip_of(members)


def mutated_npz(draw: Draw, data: bytes) -> bytes:
    """An ``.npz`` with one array mutated, its checksums right, compressed in any way."""
    members = members_of(data)
    name = draw.choice(sorted(members))
    array = members[name]
    # Most of it is pixels; what is decoded is the header.
    cut = draw.choice([128, len(array)])
    members[name] = mutated(draw, array[:cut]) + array[cut:]
    return zip_of(members, draw.choice(METHODS))


def mutated_chunk(draw: Draw, data: bytes) -> bytes:
    """A chunk whose own hash is right."""
    if len(data) < 57:
        return mutated(draw, data)
    head, part = bytearray(data[:40]), data[56:]
    if draw.random() < 0.5:
        part = mutated(draw, part)
    else:
        head[draw.randrange(40)] ^= 1 << draw.randrange(8)
    return bytes(head) + hashlib.sha256(part).digest()[:16] + part


def _flip(draw: Draw, data: bytes, other: bytes) -> bytes:
    if not data:
        return data
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


def _cut(draw: Draw, data: bytes, other: bytes) -> bytes:
    return data[: draw.randint(0, len(data))]


def _remove(draw: Draw, data: bytes, other: bytes) -> bytes:
    start = draw.randint(0, len(data))
    return data[:start] + data[start + draw.randint(0, 16) :]


def _double(draw: Draw, data: bytes, other: bytes) -> bytes:
    start = draw.randint(0, len(data))
    stop = min(start + draw.randint(1, 64), len(data))
    return data[:stop] + data[start:stop] * draw.choice([1, 1, 1, 2, 50]) + data[stop:]


def _insert(draw: Draw, data: bytes, other: bytes) -> bytes:
    place, text = draw.randint(0, len(data)), draw.choice(_TEXTS)
    return data[:place] + text + data[place + draw.choice([0, len(text)]) :]


def _splice(draw: Draw, data: bytes, other: bytes) -> bytes:
    return data[: draw.randint(0, len(data))] + other[draw.randint(0, len(other)) :]


def _number(draw: Draw, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    _place_number(draw, changed)
    return bytes(changed)


def _digits(draw: Draw, data: bytes, other: bytes) -> bytes:
    """Replace a run of digits, or a word, of a text."""
    place = draw.randint(0, max(len(data) - 1, 0))
    while place < len(data) and not data[place : place + 1].isalnum():
        place += 1
    stop = place
    while stop < len(data) and data[stop : stop + 1].isalnum():
        stop += 1
    text = draw.choice(_TEXTS) if draw.random() < 0.5 else str(draw.choice(_WHOLE)).encode()
    return data[:place] + text + data[stop:]


def _place_number(draw: Draw, data: bytearray) -> None:
    order, kind = draw.choice("<>"), draw.choice("BHIQQfd")
    if kind in "fd":
        value = draw.choice(_FLOATS)
        if kind == "f" and abs(value) > 3.4e38 and value - value == 0:
            kind = "d"
        packed = struct.pack(order + kind, value)
    else:
        value = draw.choice([*_WHOLE, len(data), len(data) - 1, len(data) + 1])
        packed = struct.pack(order + kind, value & (1 << 8 * struct.calcsize(kind)) - 1)
    if len(data) < len(packed):
        return
    place = draw.randint(0, len(data) - len(packed))
    if draw.random() < 0.5:
        place -= place % len(packed)
    data[place : place + len(packed)] = packed


_BYTES = [_flip, _flip, _cut, _remove, _double, _insert, _splice, _number, _number, _digits]


def _changed(draw: Draw, value: Any) -> Any:
    """The document with a change at a random place."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        action = draw.random()
        if action < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if action < 0.2:
            return {**value, draw.choice(["a", "", "0", "type", "99999999", key + " "]): value[key]}
        return {**value, key: _changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        action = draw.random()
        if action < 0.1:
            return value[:place] + value[place + 1 :]
        if action < 0.2:
            return [*value, *value[place:]] * draw.choice([1, 1, 1, 40])
        return [*value[:place], _changed(draw, value[place]), *value[place + 1 :]]
    if isinstance(value, int) and draw.random() < 0.6:
        return draw.choice([value - 1, value + 1, -value, value + (1 << 31), *_WHOLE])
    if isinstance(value, str) and draw.random() < 0.3:
        return mutated(draw, value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    if draw.random() < 0.05:
        nested: Any = value
        for _ in range(draw.choice([10, 400])):
            nested = [nested]
        return nested
    return draw.choice(_VALUES)
