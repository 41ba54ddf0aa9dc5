"""The golden vectors: made again from the specification alone, and read by the SDK and the server."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from vectors.make import FOLDER, MAKERS

from edge_sdk.codec import unpack
from edge_sdk.data import ArrayDataset
from edge_sdk.description import Sharing, check_description, describe
from edge_sdk.errors import ProtocolError, RunError, TensorError
from edge_sdk.manifest import Input, Parameter
from edge_sdk.protocol import Incoming, Topics, check_id, chunk_count, decode_chunk, encode_chunk, reference
from edge_sdk.protocol.messages import (
    Fact,
    FromDevice,
    FromServer,
    Ref,
    decode_from_device,
    decode_from_server,
    encode,
    number,
    to_number,
)
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
from edge_server.chain import Chain
from edge_server.uploads import Uploads

ALL = {name: json.loads((FOLDER / name).read_text(encoding="utf-8")) for name in MAKERS}
MESSAGES, TOPICS, TRANSFERS, UPDATES, SUMS, TOLD = ALL.values()
DTYPES = {"F64": "float64", "F32": "float32", "I64": "int64"}


def cases(vectors, name="fact"):
    ids = [str(vector.get(name, place)) for place, vector in enumerate(vectors)]
    return pytest.mark.parametrize("vector", vectors, ids=ids)


def floats(values, dtype=np.float64) -> np.ndarray:
    """Hexadecimal floats, or lists of them, as an array."""
    if isinstance(values, list):
        return np.array([floats(value) for value in values], dtype)
    return np.array(float.fromhex(values), dtype)


def array_of(tensor) -> np.ndarray:
    dtype = np.dtype(DTYPES[tensor["dtype"]])
    values = [int(v) if dtype.kind == "i" else float.fromhex(v) for v in tensor["values"]]
    return np.array(values, dtype).reshape(tensor["shape"])


def same_bits(found, expected) -> bool:
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.tobytes() == expected.tobytes()
    )


@pytest.mark.parametrize("name", MAKERS)
def test_the_vectors_are_those_that_the_specification_makes(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == MAKERS[name]()


def test_the_vectors_are_small_enough_to_be_read_by_people():
    assert sum(path.stat().st_size for path in Path(FOLDER).glob("*.json")) < 300_000


# Messages.


def payload_of(vector) -> bytes:
    data = bytes.fromhex(vector["hex"]) if "hex" in vector else vector["json"].encode()
    return data.ljust(vector.get("padded_to", 0))


def decoded(vector, payload):
    decode_it = decode_from_device if vector["direction"] == "up" else decode_from_server
    return decode_it(vector["type"], payload)


@cases(MESSAGES["accepted"])
def test_a_message_means_what_its_vector_says(vector):
    assert encode(decoded(vector, payload_of(vector))).decode() == vector["means"]


@cases(MESSAGES["accepted"])
def test_a_message_with_its_defaults_written_out_means_the_same(vector):
    assert decoded(vector, vector["means"].encode()) == decoded(vector, payload_of(vector))


@cases(MESSAGES["fields"], "field")
def test_a_field_is_taken_to_its_limits_and_not_beyond(vector):
    for text in vector["accepted"]:
        decoded(vector, vector["template"].replace("@", text).encode())
    for text in vector["refused"]:
        with pytest.raises(ProtocolError):
            decoded(vector, vector["template"].replace("@", text).encode())


WHY = {"long": "over the limit", "missing": "missing required field", "type": "valid|topic", "json": "valid"}


@cases(MESSAGES["refused"], "why")
def test_what_is_no_message_is_refused(vector):
    with pytest.raises(ProtocolError, match=WHY[vector["why"]]):
        decoded(vector, payload_of(vector))


def test_every_message_and_every_field_of_it_has_vectors():
    told = {(vector["type"], vector["field"]) for vector in MESSAGES["fields"]}
    types = [*get_args(FromDevice), *get_args(FromServer)]
    named = {(t.__name__.lower(), field) for t in types for field in t.__struct_fields__}
    assert {key for key in told if "." not in key[1]} == named
    assert {vector["type"] for vector in MESSAGES["accepted"]} == {t.__name__.lower() for t in types}


@cases(MESSAGES["numbers"], "text")
def test_a_number_is_read_to_the_bit_and_written_so_that_it_can_be(vector):
    assert number(vector["text"]).hex() == vector["float64"]
    assert number(to_number(float.fromhex(vector["float64"]))).hex() == vector["float64"]


@cases(MESSAGES["numbers_refused"], "text")
def test_a_number_beyond_float64_is_refused(vector):
    with pytest.raises(ProtocolError):
        number(vector["text"])


# Topics and transfers.


@cases(TOPICS["built"], "topic")
def test_a_topic_is_built_as_its_vector_says(vector):
    topics = Topics(vector["fleet"])
    found = {
        "up": lambda: topics.up(vector["device"], vector["type"]),
        "down": lambda: topics.down(vector["device"], vector["type"]),
        "all": lambda: topics.all(vector["type"]),
        "model": lambda: topics.chunk(vector["hash"], vector["index"]),
        "block": lambda: topics.block(vector["hash"], vector["block"]),
    }
    assert found[vector["of"]]() == vector["topic"]


@cases(TOPICS["ours"], "topic")
def test_a_topic_of_the_fleet_is_taken_apart(vector):
    address = Topics(vector["fleet"]).parse(vector["topic"])
    found = (address.direction, address.device, address.kind)
    assert found == (vector["direction"], vector["device"], vector["type"])


@cases(TOPICS["others"], "topic")
def test_a_topic_that_is_not_of_the_fleet_is_no_address(vector):
    assert Topics(vector["fleet"]).parse(vector["topic"]) is None


def test_ids_are_allowed_and_refused_as_the_vectors_say():
    for vector in TOPICS["ids"]:
        assert check_id(vector["id"]) == vector["id"]
    for vector in TOPICS["ids_refused"]:
        with pytest.raises(ProtocolError):
            check_id(vector["id"])


BLOB = bytes.fromhex(TRANSFERS["blob"][0]["hex"])
REF = Ref(**json.loads(TRANSFERS["blob"][0]["ref"]))
PAYLOADS = {vector["payload"]: bytes.fromhex(vector["hex"]) for vector in TRANSFERS["payloads"]}


def test_a_blob_is_announced_and_cut_as_the_vectors_say():
    assert reference(BLOB, chunk=REF.chunk) == REF
    assert chunk_count(REF) == TRANSFERS["blob"][0]["chunks"]
    for index in range(chunk_count(REF)):
        assert encode_chunk(REF, BLOB, index) == PAYLOADS[str(index)]


@cases(TRANSFERS["payloads"], "payload")
def test_a_chunk_is_refused_only_where_it_is_damaged(vector):
    if vector["is"] == "damaged":
        with pytest.raises(ProtocolError):
            decode_chunk(PAYLOADS[vector["payload"]])
    else:
        decode_chunk(PAYLOADS[vector["payload"]])


@cases(TRANSFERS["downloads"])
def test_a_receiver_takes_and_grants_as_its_vector_says(vector):
    incoming = Incoming(REF, limit=REF.size)
    assert list(incoming.next_range(vector["window"])) == vector["grant"]
    for step in vector["steps"]:
        try:
            taken = incoming.add(decode_chunk(PAYLOADS[step["payload"]]))
        except ProtocolError:
            taken = False
        whole = None
        if incoming.next_range(1) is None:
            try:
                whole = "right" if incoming.finish() == BLOB else "other"
            except ProtocolError:
                whole = "wrong"
        following = incoming.next_range(vector["window"])
        found = {"taken": taken, "whole": whole, "grant": list(following) if following else None}
        assert found == {key: step[key] for key in found}, step["payload"]


@cases(TRANSFERS["uploads"])
def test_the_server_grants_as_its_vector_says(vector):
    uploads, whole = Uploads(), None
    offer = decode_from_device("offer", vector["offer"].encode())
    uploads.begin("d", offer, limit=REF.size)
    for step in vector["steps"]:
        now = float(step["at"])
        if "payload" in step:
            whole = uploads.add("d", decode_chunk(PAYLOADS[step["payload"]]), now) or whole
        else:
            granted = [[grant.start, grant.stop] for _, grant in uploads.grants(now)]
            assert granted == step["grants"], now
    assert whole == (offer, BLOB)


# Updates.

PARAMETERS = tuple(
    Parameter(p["name"], tuple(p["shape"]), DTYPES[p["dtype"]], p["rule"]) for p in UPDATES["parameters"]
)
RULES = {parameter.name: parameter.rule for parameter in PARAMETERS}
LIMITS = UPDATES["limits"][0]


def update_of(vector):
    pytest.importorskip("zstandard") if vector["compression"] == "zstd" else None
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
        classes=len(vector["count"]), feature_size=size, input=Input((1, 1, size), (0.0,), (1.0,))
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
