"""The vectors as the tests read them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from vectors.make import FOLDER

DTYPES = {"F64": "float64", "F32": "float32", "I64": "int64"}


def load(name: str) -> dict[str, list[Any]]:
    """The lists of vectors in a file."""
    vectors: dict[str, list[Any]] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return vectors


def cases(vectors: list[Any], name: str = "fact") -> pytest.MarkDecorator:
    """One test for each vector."""
    ids = [str(vector.get(name, place)) for place, vector in enumerate(vectors)]
    return pytest.mark.parametrize("vector", vectors, ids=ids)


def floats(values: Any, dtype: npt.DTypeLike = np.float64) -> npt.NDArray[Any]:
    """Hexadecimal floats, or lists of them, as an array."""
    if isinstance(values, list):
        return np.array([floats(value) for value in values], dtype)
    return np.array(float.fromhex(values), dtype)


def array_of(tensor: dict[str, Any]) -> npt.NDArray[Any]:
    """A tensor of a vector."""
    dtype = np.dtype(DTYPES[tensor["dtype"]])
    values = [int(v) if dtype.kind == "i" else float.fromhex(v) for v in tensor["values"]]
    return np.array(values, dtype).reshape(tensor["shape"])


def same_bits(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> bool:
    """Dtype, shape and every bit are the same."""
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )
