"""Tensors as bytes: what comes back, what is refused. The safetensors package is the oracle."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.errors import TensorError
from edge_sdk.tensors import TensorSpec, check, check_finite, decode, encode

TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(5), "c": np.zeros((0, 2), "f4")}
SPECS = [TensorSpec("a", (), "int64"), TensorSpec("b", (2, 3)), TensorSpec("c", (0, 2))]


def test_the_bytes_are_a_safetensors_file():
    loaded = safetensors.numpy.load(encode(TENSORS))
    assert {n: (t.dtype, t.tolist()) for n, t in loaded.items()} == {
        n: (t.dtype, t.tolist()) for n, t in TENSORS.items()
    }


def test_the_bytes_do_not_depend_on_the_order_of_the_names():
    assert encode(dict(sorted(TENSORS.items()))) == encode(TENSORS)


def test_an_array_that_is_not_contiguous_keeps_its_values():
    view = np.arange(12, dtype=np.float32).reshape(3, 4).T
    assert safetensors.numpy.load(encode({"w": view}))["w"].tolist() == view.tolist()


def test_decoded_arrays_own_their_memory():
    data = encode(TENSORS)
    decode(data, SPECS)["b"][:] = 9
    assert decode(data, SPECS)["b"].tolist() == TENSORS["b"].tolist()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({k: TENSORS[k] for k in "ab"}, "'c' is missing"),
        ({**TENSORS, "d": np.zeros(1, "f4")}, "'d' is not part of this model"),
        ({**TENSORS, "b": np.zeros((3, 2), "f4")}, r"'b' is .*\[3, 2\], expected float32 \[2, 3\]"),
        ({**TENSORS, "b": np.zeros((2, 3), "f8")}, "'b' is"),
        ({**TENSORS, "a": np.array(5, "i4")}, "'a' is"),
        ({**TENSORS, "a": np.array([5])}, "'a' is"),
    ],
)
def test_other_tensors_than_declared_are_refused_by_name(tensors, message):
    with pytest.raises(TensorError, match=message):
        decode(encode(tensors), SPECS)
    with pytest.raises(TensorError, match=message):
        check(tensors, SPECS)


@given(st.binary(max_size=300))
def test_random_bytes_are_a_tensor_error(data):
    with pytest.raises(TensorError):
        decode(data, SPECS)


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 63) + b"{}",
        with_header(b"[" * 10_000),
        with_header({"a": {"dtype": "I64", "shape": [1 << 62, 4], "data_offsets": [0, 8]}}, bytes(8)),
        with_header({"a": {"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]}}, bytes(8)),
        with_header({"a": {"dtype": "I64", "shape": [], "data_offsets": [8, 0]}}, bytes(8)),
        with_header({"a": {"dtype": "PICKLE", "shape": [], "data_offsets": [0, 8]}}, bytes(8)),
    ],
)
def test_a_hostile_header_is_a_tensor_error(data):
    with pytest.raises(TensorError):
        decode(data, [TensorSpec("a", (), "int64")])


@pytest.mark.parametrize("cut", [0, 7, 8, 50, -1])
def test_a_truncated_file_is_a_tensor_error(cut):
    with pytest.raises(TensorError):
        decode(encode(TENSORS)[:cut], SPECS)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named(value):
    with pytest.raises(TensorError, match="'w'"):
        check_finite({"v": np.zeros(3, "f4"), "w": np.float32([0, value])})
