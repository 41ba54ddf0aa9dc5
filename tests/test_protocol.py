"""Ids, topics and messages: what may enter, what must come back, what is refused."""

import contextlib
import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.errors import ProtocolError
from edge_sdk.protocol import Topics, check_id, messages
from edge_sdk.protocol.messages import (
    Cancel,
    Declined,
    Finished,
    Grant,
    Here,
    Join,
    Leave,
    Offer,
    Receipt,
    Ref,
    Refused,
    Report,
    Taken,
    Task,
    Welcome,
    Who,
    decode_from_device,
    decode_from_server,
    encode,
    kind_of,
    number,
    to_number,
)

HASH = "ab" * 32
NONCE = "0123456789abcdef"
KEY = {"run": "f" * 32, "round": 3, "attempt": 1, "kind": "train", "hop": 2}
REF = Ref(hash=HASH, size=5_000_000, chunk=1 << 17)
FROM_DEVICE = [
    Join(sdk="0.1.0", install="c" * 32, boot="d" * 16, nonce=NONCE, examples=7),
    Join(sdk="0.1.0", install="c" * 32, boot="d" * 16, nonce=NONCE, examples=1 << 53, lease=600),
    Here(nonce=NONCE, examples=0),
    Leave(nonce=NONCE),
    Taken(**KEY, examples=12),
    Declined(**KEY, reason="battery – 12 % \U0001f50b"),
    Offer(**KEY, blob=REF, examples=12),
    Report(**KEY, loss=to_number(1e-300), correct=3, examples=9),
    Grant(blob=HASH, start=0, stop=16),
]
FROM_SERVER = [
    Who(jitter=2, server="e" * 16),
    Welcome(nonce=NONCE, run="f" * 32, bundle=REF, model=REF, heartbeat=20, come_back=None),
    Welcome(nonce=NONCE, run="f" * 32, bundle=REF, model=REF, heartbeat=20, come_back=90),
    Refused(nonce=NONCE, code="id-in-use", reason="take another"),
    Task(
        **KEY,
        nonce=NONCE,
        bundle=REF,
        model=REF,
        deadline=60,
        epochs=2,
        batch_size=16,
        lr=to_number(0.3),
        weight_decay=to_number(1e-4),
        seed=1 << 53,
        bounds={"mean": 6},
        exponents={"mean": -62},
    ),
    Receipt(**KEY, accepted=False, reason="no", blob=HASH),
    Cancel(**KEY, reason="late"),
    Finished(run="f" * 32, model=REF),
    Grant(blob=HASH, start=3, stop=4),
]


@pytest.mark.parametrize("text", ["a", "7", "jetson-07", "a.b.c", "A_b-C", "x" * 64])
def test_an_ordinary_id_is_allowed(text):
    assert check_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *["", "a/b", "a+b", "a#", "$SYS", "..", "a..b", "a\0b", "x" * 65, ".hidden", "-flag", "_x", "a b"],
        *["a\n", "\u0430bc", "d\u00e9vice", "\uff41", "\u0661", "a\u200bb"],
    ],
)
def test_an_id_that_could_mislead_is_refused(text):
    with pytest.raises(ProtocolError, match="not allowed"):
        check_id(text)


def test_a_refused_id_is_shown_on_one_line():
    with pytest.raises(ProtocolError) as error:
        check_id("x\n" * 1000)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_fleet_with_a_wildcard_has_no_topics():
    with pytest.raises(ProtocolError, match="fleet"):
        Topics("+")


def test_no_topic_has_more_than_seven_slashes():
    topics = Topics("f" * 64)
    made = [topics.up("d" * 64, "declined"), topics.down("d" * 64, "finished"), topics.all("finished")]
    made += [topics.chunk(HASH, 1 << 21), topics.block(HASH, 1 << 13)]
    assert max(topic.count("/") for topic in made) <= 7


def test_no_topic_is_longer_than_aws_allows():
    topics = Topics("f" * 64)
    assert max(map(len, [topics.up("d" * 64, "declined"), topics.chunk(HASH, 1 << 21)])) <= 256


def test_a_block_takes_its_256_chunks_and_no_other():
    from paho.mqtt.client import topic_matches_sub

    topics = Topics("f")
    taken = [i for i in range(1024) if topic_matches_sub(topics.block(HASH, 1), topics.chunk(HASH, i))]
    assert taken == list(range(256, 512))


def test_a_topic_is_taken_apart_as_it_was_made():
    topics = Topics("f")
    address = topics.parse(topics.up("dev.1", "join"))
    assert (address.direction, address.device, address.kind) == ("up", "dev.1", "join")


@pytest.mark.parametrize(
    "topic", ["", "edge/v1/other/up/d/join", "edge/v1/f", "edge/v1/f/up/d", "edge/v1/f/up/a..b/join"]
)
def test_a_topic_of_somebody_else_is_none_of_ours(topic):
    assert Topics("f").parse(topic) is None


def decoder(message):
    return decode_from_device if message in FROM_DEVICE else decode_from_server


@pytest.mark.parametrize("message", [*FROM_DEVICE, *FROM_SERVER], ids=kind_of)
def test_a_message_comes_back_as_it_was_sent(message):
    assert decoder(message)(kind_of(message), encode(message)) == message


@pytest.mark.parametrize("message", [*FROM_DEVICE, *FROM_SERVER], ids=kind_of)
def test_a_message_holds_no_float_as_a_json_number(message):
    floats = []
    json.loads(encode(message), parse_float=floats.append)
    assert floats == []


@pytest.mark.parametrize("message", [*FROM_DEVICE, *FROM_SERVER], ids=kind_of)
def test_a_message_with_a_field_of_tomorrow_is_understood_today(message):
    document = {**json.loads(encode(message)), "tomorrow": [1, {"x": 2.5}]}
    assert decoder(message)(kind_of(message), json.dumps(document).encode()) == message


@pytest.mark.parametrize("message", [*FROM_DEVICE, *FROM_SERVER], ids=kind_of)
def test_a_message_on_the_topic_of_another_kind_is_refused(message):
    with pytest.raises(ProtocolError):
        decoder(message)("other", encode(message))


def test_every_kind_of_message_is_among_those_tested():
    named = {m.__name__ for m in messages.Message.__subclasses__() + messages.Key.__subclasses__()} - {"Key"}
    assert {type(m).__name__ for m in [*FROM_DEVICE, *FROM_SERVER]} == named


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("run", "f" * 32 + "\n"), ("run", "F" * 32), ("run", "../" * 8), ("round", -1), ("round", 1 << 54)],
        *[("round", 1.5), ("round", "3"), ("round", True), ("attempt", None), ("reason", "x" * 501)],
    ],
)
def test_a_field_out_of_its_range_is_refused(field, value):
    document = {**json.loads(encode(FROM_DEVICE[5])), field: value}
    with pytest.raises(ProtocolError, match="not valid"):
        decode_from_device("declined", json.dumps(document).encode())


@pytest.mark.parametrize("digest", [HASH + "\n", HASH[:-1] + "\n", HASH.upper(), HASH[:-2], "", HASH + "ab"])
def test_a_hash_is_64_hexadecimal_digits_and_nothing_else(digest):
    payload = json.dumps({"type": "grant", "blob": digest, "start": 0, "stop": 1}).encode()
    with pytest.raises(ProtocolError):
        decode_from_device("grant", payload)


@pytest.mark.parametrize("text", ["nan", "inf", "1,5", "0x10", "1_0", " 1", "1\n", "1" * 21, "\u0661", ""])
def test_a_number_is_a_plain_decimal(text):
    document = {**json.loads(encode(FROM_DEVICE[7])), "loss": text}
    with pytest.raises(ProtocolError):
        decode_from_device("report", json.dumps(document).encode())


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_survives_its_text_exactly_and_fits_the_pattern(value):
    report = Report(**KEY, loss=to_number(value), correct=0, examples=0)
    back = decode_from_device("report", encode(report))
    assert number(back.loss).hex() == value.hex()


def test_a_number_beyond_float64_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="range"):
        number("1e999")


def raises_only_protocol_errors(kind, payload):
    for decode in (decode_from_device, decode_from_server):
        with contextlib.suppress(ProtocolError):
            decode(kind, payload)


KINDS = st.sampled_from([kind_of(m) for m in [*FROM_DEVICE, *FROM_SERVER]] + ["chunk", ""])


@given(KINDS, st.binary(max_size=200))
@settings(max_examples=200)
def test_random_bytes_are_a_protocol_error(kind, payload):
    raises_only_protocol_errors(kind, payload)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*FROM_DEVICE, *FROM_SERVER]), st.data())
@settings(max_examples=300)
def test_a_field_of_any_wrong_type_is_a_protocol_error(message, data):
    document = json.loads(encode(message))
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(json_values)
    raises_only_protocol_errors(kind_of(message), json.dumps(document).encode())


@pytest.mark.parametrize("digits", [20, 400, 5000, 16_000])
@pytest.mark.parametrize("field", ["round", "attempt", "run", "reason"])
def test_a_huge_number_is_a_protocol_error(digits, field):
    document = json.dumps({**json.loads(encode(FROM_DEVICE[5])), field: "@"}).replace('"@"', "9" * digits)
    with pytest.raises(ProtocolError):
        decode_from_device("declined", document.encode())


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"type":"leave","nonce":['])
def test_deep_nesting_is_a_protocol_error(opening):
    with pytest.raises(ProtocolError):
        decode_from_device("leave", (opening * 16_000)[: messages.MAX_MESSAGE])


def test_text_that_is_not_utf8_is_a_protocol_error():
    payload = encode(FROM_DEVICE[5]).replace(b"battery", b"b\xff\xfeery")
    with pytest.raises(ProtocolError):
        decode_from_device("declined", payload)


def test_a_message_over_its_limit_is_refused_before_it_is_parsed():
    with pytest.raises(ProtocolError, match="over the limit"):
        decode_from_device("leave", b"\xff" * (messages.MAX_MESSAGE + 1))


def test_the_contract_has_a_json_schema_for_other_languages():
    schema = msgspec.json.schema(messages.FromDevice)
    assert "Offer" in json.dumps(schema)
