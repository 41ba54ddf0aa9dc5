"""The golden vectors: made again from the specification alone; messages and transfers read by the SDK."""

import json
from typing import get_args

import pytest
from vectors.make import FOLDER, MAKERS
from vectors.reading import cases, load

from edge_sdk.errors import ProtocolError
from edge_sdk.protocol import Incoming, Topics, check_id, chunk_count, decode_chunk, encode_chunk, reference
from edge_sdk.protocol.messages import (
    FromDevice,
    FromServer,
    Ref,
    decode_from_device,
    decode_from_server,
    encode,
    number,
    to_number,
)
from edge_server.uploads import Uploads

MESSAGES, TOPICS, TRANSFERS = (load(f"{name}.json") for name in ("messages", "topics", "transfers"))


@pytest.mark.parametrize("name", MAKERS)
def test_the_vectors_are_those_that_the_specification_makes(name):
    assert (FOLDER / name).read_text(encoding="utf-8") == MAKERS[name]()


def test_the_vectors_are_small_enough_to_be_read_by_people():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.json")) < 300_000


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
def test_the_server_grants_as_its_vector_says(vector, tmp_path):
    uploads, whole = Uploads(tmp_path), None
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
