"""How the vectors write what must be exact, in a form that any language reads: see README.md."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Tensor = tuple[str, list[int], list[Any]]
"""The safetensors name of a dtype, the shape, the values row by row."""

_FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I8": "b"}


def float32(value: float) -> float:
    """The float32 nearest to ``value``, as struct rounds it: half to even."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def float16(value: float) -> float:
    """The float16 nearest to ``value``."""
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def exact(value: Any) -> Any:
    """Floats in C99's hexadecimal, integers in decimal, both as strings; lists of them likewise."""
    if isinstance(value, list):
        return [exact(each) for each in value]
    if isinstance(value, float):
        return value.hex() if math.isfinite(value) else str(value)
    return str(value)


def tensor(dtype: str, shape: Sequence[int], values: Iterable[Any]) -> Tensor:
    """A tensor whose values are rounded to its dtype."""
    rounded = {"F32": float32, "F16": float16}.get(dtype, lambda value: value)
    return dtype, list(shape), [rounded(value) for value in values]


def shown(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors as a vector has them."""
    return {
        name: {"dtype": dtype, "shape": shape, "values": exact(values)}
        for name, (dtype, shape, values) in tensors.items()
    }


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file: the length of the header, the header, the data in the order given."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        part = struct.pack(f"<{len(values)}{_FORMATS[dtype]}", *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def document(sections: Mapping[str, Sequence[Any]]) -> str:
    """JSON text: an object of lists, one vector a line."""
    parts = []
    for name, vectors in sections.items():
        lines = ",\n".join(json.dumps(vector, ensure_ascii=False) for vector in vectors)
        parts.append(f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"
