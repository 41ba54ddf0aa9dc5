"""The golden vectors of tensors: updates and what becomes of them, and what a device tells of its data."""

import math
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from vectors.reading import DTYPES, array_of, cases, floats, load, same_bits

from edge_sdk.codec import unpack
from edge_sdk.data import ArrayDataset
from edge_sdk.description import Sharing, check_description, describe
from edge_sdk.errors import RunError, TensorError
from edge_sdk.manifest import Input, Parameter
from edge_sdk.protocol.messages import Fact
from edge_sdk.statistics import check_statistics, class_statistics, packed, statistics_specs
from edge_sdk.tensors import TensorSpec, decode
from edge_sdk.update import check_update, difference
from edge_server.aggregation import (
    MeanUpdate,
    Precision,
    RobustMean,
    WeightedSum,
    fedadam,
    fedavg,
    fedavgm,
    plan_precision,
)
from edge_server.buffered import share_of
from edge_server.chain import Chain

UPDATES, SUMS, TOLD = (load(f"{name}.json") for name in ("updates", "sums", "statistics"))

# Updates.

PARAMETERS = tuple(
    Parameter(p["name"], tuple(p["shape"]), DTYPES[p["dtype"]], p["rule"]) for p in UPDATES["parameters"]
)
RULES = {parameter.name: parameter.rule for parameter in PARAMETERS}
LIMITS = UPDATES["limits"][0]


def update_of(vector):
    data, codec, compression = bytes.fromhex(vector["hex"]), vector["codec"], vector["compression"]
    update = unpack(data, PARAMETERS, codec, compression, limit=LIMITS["bytes"])
    check_update(update, RULES, LIMITS["bounds"])
    return update


@cases(UPDATES["differences"])
def test_an_update_is_the_difference_to_the_bit(vector):
    received, trained, update = (
        {name: array_of(tensor) for name, tensor in vector[part].items()}
        for part in ("received", "trained", "update")
    )
    found = difference(received, trained)
    assert all(same_bits(found[name], update[name]) for name in update)


@cases(UPDATES["read"])
def test_the_server_reads_an_update_to_the_bit(vector):
    found = update_of(vector)
    assert found.keys() == vector["read"].keys()
    for name, tensor in vector["read"].items():
        assert same_bits(found[name], array_of(tensor)), name


@cases(UPDATES["refused"])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_an_update_that_breaks_a_rule_is_refused(vector):
    with pytest.raises(TensorError):
        update_of(vector)


# What the server makes of them.


@cases(SUMS["precision"])
def test_the_exponents_are_those_of_the_specification(vector):
    total = int(vector["max_examples"]) * vector["cohort"]
    if vector["exponent"] is None:
        with pytest.raises(RunError):
            plan_precision({"mean": vector["bound"]}, largest_total=total)
    else:
        planned = plan_precision({"mean": vector["bound"]}, largest_total=total)
        assert planned.exponents["mean"] == vector["exponent"]


@pytest.mark.parametrize("order", [1, -1])
@cases(SUMS["means"])
def test_the_mean_has_the_bits_of_whole_numbers_in_any_order(vector, order):
    size = len(vector["sums"])
    total = WeightedSum(
        [TensorSpec("w", (size,))], {"w": "mean"}, Precision({"mean": 6}, {"mean": vector["exponent"]})
    )
    for update in vector["updates"][::order]:
        total.add({"w": floats(update["values"], np.float32)}, update["examples"])
    assert total._sums["w"].tolist() == [int(text) for text in vector["sums"]]
    assert same_bits(total.mean().delta["w"], floats(vector["mean"]))


def test_what_a_late_update_counts_for_is_that_of_whole_numbers():
    assert all(share_of(vector["staleness"]) == vector["share"] for vector in SUMS["shares"])


@cases(SUMS["buffers"])
def test_the_mean_of_a_buffer_has_the_bits_of_whole_numbers(vector):
    specs, precision = [TensorSpec("w", (2,))], Precision({"mean": 6}, {"mean": vector["exponent"]})
    total = WeightedSum(specs, {"w": "mean"}, precision, unit=256)
    for update in vector["updates"]:
        values = floats(update["values"], np.float32)
        total.add({"w": values}, update["examples"], share=share_of(update["staleness"]))
    assert total._sums["w"].tolist() == [int(text) for text in vector["sums"]]
    assert same_bits(total.mean().delta["w"], floats(vector["mean"]))


@cases(SUMS["middles"])
def test_the_middle_of_updates_has_the_bits_of_its_vector(vector):
    middle = RobustMean({"w": "mean"}, vector["rule"], trim=float.fromhex(vector["trim"]))
    for update in vector["updates"]:
        middle.add({"w": floats(update, np.float32)}, 1)
    assert same_bits(middle.mean().delta["w"], floats(vector["mean"]))


@cases(SUMS["counters"])
def test_a_counter_advances_by_the_largest_advance(vector):
    total = WeightedSum([TensorSpec("n", (), "int64")], {"n": "counter"}, Precision({}, {}))
    for update in vector["updates"]:
        total.add({"n": np.array(int(update))}, 1)
    state = fedavg().init({"n": np.array(int(vector["counter"]))}, {"n": "counter"})
    assert int(fedavg().apply(state, total.mean()).weights["n"]) == int(vector["next"])


def model(values, dtype=np.float32):
    """Trainable weights, a statistic and a counter: arrays of a vector's texts."""
    return {
        "w": floats(values["w"], dtype),
        "s": floats(values["s"], dtype),
        "n": np.array([int(n) for n in values["n"]]),
    }


KINDS = {"w": "mean", "s": "statistic", "n": "counter"}


@cases(SUMS["strategies"], "strategy")
def test_two_steps_of_a_strategy_have_the_bits_of_their_vector(vector):
    make = {"fedavg": fedavg, "fedavgm": fedavgm, "fedadam": fedadam}[vector["strategy"]]
    settings = {n: v if isinstance(v, bool) else float.fromhex(v) for n, v in vector["settings"].items()}
    strategy = make(**settings)
    state = strategy.init(model(SUMS["weights"][0]), KINDS)
    for step in vector["steps"]:
        state = strategy.apply(state, MeanUpdate(model(step["mean"], np.float64), KINDS))
        for name, expected in model(step["weights"]).items():
            assert same_bits(state.weights[name], expected), name
        for slot in state.slots:
            assert same_bits(state.slots[slot]["w"], floats(step[slot])), slot


@cases(SUMS["chains"])
def test_a_chain_hands_on_weights_and_comes_to_an_update_to_the_bit(vector):
    chain = Chain(["a", "b"], model(vector["weights"]))
    for turn in vector["turns"]:
        chain.forward(model(turn["update"]), turn["examples"])
        for name, expected in model(turn["weights"]).items():
            assert same_bits(chain.weights[name], expected), name
    assert chain.examples == vector["examples"]
    for name, expected in model(vector["update"]).items():
        assert same_bits(chain.update()[name], expected), name


# What a device tells of its data.


def told_by_device(vector):
    features = floats(vector["features"], np.float32)
    size = features.shape[1]
    manifest = SimpleNamespace(
        classes=len(vector["count"]),
        backbone=None,
        feature_size=size,
        input=Input((1, 1, size), (0.0,), (1.0,)),
    )
    as_they_are = SimpleNamespace(embed=lambda x: x.reshape(-1, size))
    data = ArrayDataset(features[:, None], np.array(vector["labels"]))
    return class_statistics(
        as_they_are,
        manifest,
        data,
        np.arange(len(data)),
        covariance=vector["covariance"],
        rank=vector.get("rank", 0),
        withhold_below=vector["withhold_below"],
    )


@cases(TOLD["statistics"])
def test_class_statistics_are_those_of_exact_arithmetic(vector):
    found, tolerance = told_by_device(vector), float(vector["tolerance"])
    assert found["count"].tolist() == [int(n) for n in vector["count"]]
    for name in ("mean", "scatter"):
        expected = floats(vector[name])
        bound = tolerance * np.abs(expected).max(axis=1, keepdims=True) + math.ulp(0)
        assert (np.abs(found[name] - expected) <= bound).all(), name
    for label, squared in enumerate(vector.get("squared_factor", [])):
        factor = found["factor"][label]
        np.testing.assert_allclose(packed(factor.T @ factor), floats(squared), atol=9 * tolerance)


STATISTICS = TOLD["statistics_limits"][0]


def checked_statistics(vector):
    specs = statistics_specs(STATISTICS["classes"], STATISTICS["features"], STATISTICS["covariance"])
    tensors = decode(bytes.fromhex(vector["hex"]), specs)
    check_statistics(tensors, max_examples=STATISTICS["max_examples"])


@cases(TOLD["statistics_read"])
def test_statistics_that_can_be_are_read(vector):
    checked_statistics(vector)


@cases(TOLD["statistics_refused"])
def test_statistics_that_cannot_be_are_refused(vector):
    with pytest.raises(TensorError):
        checked_statistics(vector)


@cases(TOLD["histograms"])
def test_a_histogram_counts_copies_and_withholds_rare_classes(vector):
    labels = np.array([*vector["labels"], *vector["copies"]], np.int64)
    data = ArrayDataset(np.zeros((len(labels), 1, 1), np.uint8), labels)
    own = np.arange(len(vector["labels"]))
    told = describe(
        data,
        own,
        SimpleNamespace(classes=vector["classes"]),
        ["histogram"],
        Sharing(histogram=True, withhold_below=vector["withhold_below"]),
        trained=lambda: (data, np.arange(len(labels))),
        open_describer=lambda: pytest.fail("a histogram needs no images"),
    )
    assert told["histogram"].tolist() == [int(n) for n in vector["histogram"]]


def read_description(vector):
    limits = TOLD["descriptions_limits"][0]
    manifest = SimpleNamespace(
        classes=limits["classes"],
        describe=SimpleNamespace(dims=limits["dims"], feature_size=limits["features"]),
    )
    data = bytes.fromhex(vector["hex"])
    return check_description(data, get_args(Fact), manifest, max_examples=limits["max_examples"])


@cases(TOLD["descriptions_read"])
def test_a_description_is_read_to_the_bit(vector):
    found = read_description(vector)
    assert found.keys() == vector["read"].keys()
    assert all(same_bits(found[name], array_of(tensor)) for name, tensor in vector["read"].items())


@cases(TOLD["descriptions_refused"])
def test_a_description_that_cannot_be_is_refused(vector):
    with pytest.raises(TensorError):
        read_description(vector)
