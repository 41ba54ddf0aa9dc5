"""The descriptor on a device: its hash against IEEE arithmetic step by step, its mean against plain sums."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_sdk.bundle import Bundle
from edge_sdk.data import ArrayDataset
from edge_sdk.errors import BundleError, DataError, TensorError
from edge_sdk.examples import FROZEN_BATCH as BATCH
from edge_sdk.examples import Cancelled
from edge_sdk.features import Hashing, open_describer
from edge_sdk.manifest import Describe
from edge_sdk.tensors import encode

VECTORS = Path(__file__).parent / "vectors" / "lsh.json"
UNIT = 2.0**-30


def hashed(a, b, r, x) -> list[int]:
    """The hash as docs/bundle.md has it, in Python's own floats: one rounding an operation."""
    hashes = []
    for weights, offset in zip(a, b, strict=True):
        total = 0.0
        for weight, value in zip(weights, x, strict=True):
            product = weight * value
            total = total + product
        hashes.append(math.floor((total + offset) / r))
    return hashes


def vectors() -> list[dict[str, object]]:
    """What tests/vectors/lsh.json holds: floats as C99 writes them in hexadecimal, for any language."""
    draw = np.random.default_rng(0)
    cases = {
        "negative quotients are floored, not cut": ([[1.0], [-1.0]], [0.0, 0.0], 2.0, [3.0]),
        "a quotient on the edge belongs to the bucket above": ([[1.0], [1.0]], [0.0, 3.0], 3.0, [-6.0]),
        "summed from the first feature to the last": (
            [[1.0, 1.0, 1.0]], [0.5], 1.0, [2.0**53, 1.0, -(2.0**53)],
        ),
        "products are rounded: no fused multiply-add": (
            [[1.0, -1.0 - UNIT]], [0.0], 1.0, [1 + 2 * UNIT, 1.0 + UNIT],
        ),
        "divided by r, not multiplied by its inverse": ([[1.0]], [0.0], 49.0, [49.0]),
        "b is added last": ([[1.0, 1.0]], [1.0], 1.0, [2.0**53, -(2.0**53)]),
        "as in a bundle": (
            draw.standard_normal((5, 60)).tolist(), (draw.random(5) * 3).tolist(), 3.0,
            (draw.random(60) * 6).tolist(),
        ),
    }  # fmt: skip
    return [
        {
            "fact": fact,
            "a": [[value.hex() for value in row] for row in a],
            "b": [value.hex() for value in b],
            "r": r.hex(),
            "x": [value.hex() for value in x],
            "hash": [str(value) for value in hashed(a, b, r, x)],
        }
        for fact, (a, b, r, x) in cases.items()
    ]


def floats(values) -> np.ndarray:
    return np.array([float.fromhex(value) for value in values])


def test_the_golden_vectors_are_those_of_the_specification():
    assert json.loads(VECTORS.read_text()) == vectors()


@pytest.mark.parametrize("vector", json.loads(VECTORS.read_text()), ids=lambda vector: vector["fact"])
def test_the_hash_gives_the_golden_vectors(vector):
    hashing = Hashing(
        np.stack([floats(row) for row in vector["a"]]), floats(vector["b"]), float.fromhex(vector["r"])
    )
    found = hashing.lsh(floats(vector["x"]))
    assert found.dtype == np.int64
    assert found.tolist() == [int(value) for value in vector["hash"]]


def test_a_real_size_is_hashed_as_python_would():
    draw = np.random.default_rng(1)
    a, b, x = draw.standard_normal((32, 1280)), draw.random(32) * 3, draw.random(1280)
    assert Hashing(a, b, 3.0).lsh(x).tolist() == hashed(a.tolist(), b.tolist(), 3.0, x.tolist())


A, B = np.ones((2, 4)), np.zeros(2)


@pytest.mark.parametrize(
    ("a", "b", "r"),
    [
        (A, B, 0.0),
        (A, B, -1.0),
        (A, B, math.nan),
        (A, B, math.inf),
        (A, np.zeros(3), 3.0),
        (A[0], np.zeros(4), 3.0),
        (A.astype(np.float32), B, 3.0),
        (A, np.full(2, np.nan), 3.0),
    ],
)
def test_a_hash_of_no_use_is_refused(a, b, r):
    with pytest.raises(TensorError):
        Hashing(a, b, r)


@pytest.mark.parametrize(
    "feature",
    [
        np.zeros(3),
        np.zeros(4, np.float32),
        np.full(4, np.nan),
        np.full(4, 1e300),
        np.array([np.inf, 0, 0, 0]),
    ],
)
def test_a_feature_that_has_no_hash_is_refused(feature):
    with pytest.raises(TensorError, match="feature"):
        Hashing(A, B, 1e-3).lsh(feature)


def describing(
    paper: Bundle, scale: float = 1.0, declared: int = 64, entry: str = "x", **lsh: np.ndarray
) -> Bundle:
    """``paper`` with a describe program that gives an image's own 64 pixels, times ``scale``."""
    nodes = [
        helper.make_node("Flatten", [entry], ["flat"]),
        helper.make_node("Mul", ["flat", "s"], ["features"]),
    ]
    graph = helper.make_graph(
        nodes,
        "pixels",
        [helper.make_tensor_value_info(entry, TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(np.array(scale, np.float32), "s")],
    )
    program = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    draw = np.random.default_rng(2)
    tensors = {"a": draw.standard_normal((3, declared)), "b": draw.random(3), "r": np.array(1.0), **lsh}
    members = {"describe/lsh": encode(tensors), "onnx/d": program.SerializeToString()}
    manifest = msgspec.structs.replace(
        paper.manifest,
        input=msgspec.structs.replace(paper.manifest.input, mean=(0.5,), std=(0.1,)),
        describe=Describe(declared, 3, "describe/lsh", {"onnx": "onnx/d"}),
    )
    kept = {name: paper.member(name) for name in paper.manifest.members if name.startswith("onnx")}
    return Bundle.build(manifest, paper.weights, kept | members)


def pixels(count: int) -> ArrayDataset:
    draw = np.random.default_rng(3)
    return ArrayDataset(draw.integers(0, 256, (count, 8, 8), np.uint8), np.zeros(count, np.int64))


def test_the_mean_is_summed_in_float64_in_the_order_of_the_indices(paper):
    data, indices = pixels(3 * BATCH), np.random.default_rng(4).permutation(3 * BATCH)[: 2 * BATCH + 5]
    total = np.zeros(64)
    for index in indices:
        total = total + (data.images[index].reshape(-1).astype(np.float32) / np.float32(255))
    found = open_describer(describing(paper)).mean_feature(data, indices)
    assert found.dtype == np.float64
    assert found.tobytes() == (total / len(indices)).tobytes()


def test_the_descriptor_is_the_hash_of_the_mean_by_the_bundles_own_tensors(paper):
    bundle, data = describing(paper), pixels(7)
    mean = (data.images.reshape(7, 64).astype(np.float32) / np.float32(255)).astype(np.float64).mean(0)
    draw = np.random.default_rng(2)
    a, b = draw.standard_normal((3, 64)), draw.random(3)
    found = open_describer(Bundle.read(bundle.data)).descriptor(data, np.arange(7))
    assert found.tolist() == np.floor(a @ mean + b).tolist()


def test_new_weights_leave_the_describer_as_it_was(paper):
    bundle, data = describing(paper), pixels(3)
    moved = bundle.with_weights({name: tensor + 1 for name, tensor in bundle.weights.items()})
    before, after = (open_describer(b).descriptor(data, np.arange(3)) for b in (bundle, moved))
    assert before.tolist() == after.tolist()


def test_a_description_stops_between_two_batches(paper):
    asked = iter([False, False, True])
    with pytest.raises(Cancelled):
        open_describer(describing(paper)).mean_feature(
            pixels(9 * BATCH), np.arange(9 * BATCH), cancelled=lambda: next(asked)
        )


def test_no_examples_have_no_description(paper):
    with pytest.raises(DataError, match="no example"):
        open_describer(describing(paper)).descriptor(pixels(3), np.array([], np.int64))


def test_a_bundle_without_a_describer_says_how_to_get_one(paper):
    with pytest.raises(BundleError, match=r"'paper' cannot describe data: export it with --describe"):
        open_describer(paper)


def test_features_that_are_not_finite_are_refused(paper):
    describer = open_describer(describing(paper, scale=np.nan))
    with pytest.raises(BundleError, match="no finite features"):
        describer.mean_feature(pixels(3), np.arange(3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"declared": 63}, r"gives 'features' as float32 \[batch, 64\], which its manifest does not"),
        ({"entry": "image"}, r"takes 'image' as float32 \[batch, 1, 8, 8\], which its manifest does not"),
    ],
)
def test_a_network_that_does_not_keep_to_the_manifest_is_refused(paper, wrong, message):
    with pytest.raises(BundleError, match=message):
        open_describer(describing(paper, **wrong))


@pytest.mark.parametrize(
    ("lsh", "message"),
    [({"a": np.zeros((2, 64))}, "tensor 'a'"), ({"b": np.zeros(3, np.float32)}, "tensor 'b'")],
)
def test_a_bundle_whose_hash_is_not_as_declared_is_refused(paper, lsh, message):
    with pytest.raises(TensorError, match=message):
        describing(paper, **lsh)


def test_a_hash_without_a_width_is_refused_when_it_is_opened(paper):
    with pytest.raises(BundleError, match=r"describe/lsh: the width r .* above 0"):
        open_describer(describing(paper, r=np.array(0.0)))


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (Describe(64, 3, "describe/none", {"onnx": "onnx/t"}), "describe/none is missing"),
        (Describe(64, 3, "onnx/t", {"onnx": "onnx/none"}), "onnx/none is missing"),
        (Describe(64, 3, "onnx/t", {"other": "onnx/t"}), "for a runtime that it does not list"),
        (Describe(64, 0, "onnx/t", {"onnx": "onnx/t"}), "dims"),
        (Describe(64, 5000, "onnx/t", {"onnx": "onnx/t"}), "dims"),
    ],
)
def test_a_manifest_with_an_impossible_describer_is_refused(paper, describe, message):
    members = {name: paper.member(name) for name in paper.manifest.members if name.startswith("onnx")}
    manifest = msgspec.structs.replace(paper.manifest, describe=describe)
    with pytest.raises(BundleError, match=message):
        Bundle.build(manifest, paper.weights, members)
