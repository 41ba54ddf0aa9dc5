"""Chunks: any order, doubles, strangers, damage; and the server's turns at granting them."""

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.errors import ProtocolError
from edge_sdk.protocol import Chunk, Incoming, chunk_count, decode_chunk, encode_chunk, reference
from edge_sdk.protocol.messages import Offer, Ref
from edge_server.uploads import ON_THE_WAY, OUTSTANDING, STALL, WINDOW, Uploads

DATA = random.Random(0).randbytes(10_000)
REF = reference(DATA, chunk=1024)


def chunks(ref=REF, data=DATA):
    return [decode_chunk(encode_chunk(ref, data, index)) for index in range(chunk_count(ref))]


@given(st.permutations(range(10)), st.lists(st.integers(0, 9), max_size=20))
@settings(max_examples=50)
def test_chunks_may_come_in_any_order_and_twice(order, doubles):
    incoming = Incoming(REF, limit=len(DATA))
    for index in [*doubles, *order]:
        incoming.add(chunks()[index])
    assert incoming.finish() == DATA


def test_a_double_is_counted_once():
    incoming = Incoming(REF, limit=len(DATA))
    assert [incoming.add(chunks()[9]) for _ in range(3)] == [True, False, False]
    assert incoming.received == 10_000 - 9 * 1024


def test_a_chunk_of_another_transfer_is_not_taken():
    other = random.Random(1).randbytes(10_000)
    incoming = Incoming(REF, limit=len(DATA))
    assert not any(incoming.add(chunk) for chunk in chunks(reference(other, chunk=1024), other))


def test_a_chunk_of_the_same_blob_cut_otherwise_is_not_taken():
    incoming = Incoming(REF, limit=len(DATA))
    assert not any(incoming.add(chunk) for chunk in chunks(reference(DATA, chunk=2048)))


@pytest.mark.parametrize("length", [0, 1, 1023, 1025])
def test_a_chunk_of_the_wrong_length_is_not_taken(length):
    assert not Incoming(REF, limit=len(DATA)).add(Chunk(REF.hash, 0, bytes(length)))


def test_a_chunk_beyond_the_end_is_not_taken():
    assert not Incoming(REF, limit=len(DATA)).add(Chunk(REF.hash, 10, DATA[:1024]))


@given(st.integers(0, 1024 + 55), st.integers(1, 255))
@settings(max_examples=100)
def test_a_damaged_chunk_is_refused_or_belongs_elsewhere(position, flip):
    payload = bytearray(encode_chunk(REF, DATA, 3))
    payload[position] ^= flip
    try:
        chunk = decode_chunk(bytes(payload))
    except ProtocolError:
        return
    assert (chunk.blob, chunk.index) != (REF.hash, 3)


@given(st.binary(max_size=200))
def test_random_bytes_are_no_chunk(payload):
    with pytest.raises(ProtocolError):
        decode_chunk(payload)


def test_a_blob_over_the_limit_is_refused_before_anything_is_allocated():
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="over the limit"):
            Incoming(Ref(hash="0" * 64, size=1 << 31, chunk=1024), limit=1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_announced_blob_costs_no_memory_before_its_first_chunk():
    tracemalloc.start()
    try:
        Incoming(Ref(hash="0" * 64, size=1 << 30, chunk=1 << 20), limit=1 << 31)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_whole_of_another_hash_is_refused_and_can_be_fetched_again():
    incoming = Incoming(REF, limit=len(DATA))
    forged = Chunk(REF.hash, 4, bytes(1024))
    for chunk in [forged, *chunks()]:
        incoming.add(chunk)
    with pytest.raises(ProtocolError, match="SHA-256"):
        incoming.finish()
    assert all(incoming.add(chunk) for chunk in chunks())
    assert incoming.finish() == DATA


def test_what_is_not_complete_is_not_given_out():
    incoming = Incoming(REF, limit=len(DATA))
    incoming.add(chunks()[0])
    with pytest.raises(ProtocolError):
        incoming.finish()


def test_a_broken_transfer_goes_on_at_the_missing_chunk():
    incoming = Incoming(REF, limit=len(DATA))
    for index in (0, 1, 2, 5):
        incoming.add(chunks()[index])
    assert incoming.next_range(16) == (3, 5)


def test_a_message_with_a_chunk_fits_aws_iot_core():
    data = bytes(1 << 20)
    assert len(encode_chunk(reference(data), data, 0)) + 256 <= 128 << 10


def offer(ref=REF):
    return Offer(run="a" * 32, round=1, attempt=0, kind="train", blob=ref, examples=1)


def test_all_that_is_granted_stays_below_a_brokers_queue(tmp_path):
    uploads = Uploads(tmp_path)
    big = Ref(hash="0" * 64, size=1 << 24, chunk=1024)
    for device in range(100):
        uploads.begin(f"d{device}", offer(big), limit=1 << 24)
    granted = [grant for now in range(2) for _, grant in uploads.grants(float(now))]
    assert sum(grant.stop - grant.start for grant in granted) == OUTSTANDING
    assert max(grant.stop - grant.start for grant in granted) == WINDOW


def test_a_stalled_device_waits_behind_the_others(tmp_path):
    uploads = Uploads(tmp_path)
    big = Ref(hash="0" * 64, size=1 << 24, chunk=1024)
    for device in range(OUTSTANDING // WINDOW + 1):
        uploads.begin(f"d{device:02}", offer(big), limit=1 << 24)
    first = [device for device, _ in uploads.grants(0.0)]
    assert "d16" not in first
    # What was granted may still stand in the broker's queue.
    assert uploads.grants(STALL + 1) == []
    assert next(device for device, _ in uploads.grants(STALL + 1 + ON_THE_WAY)) == "d16"


def test_an_upload_is_whole_with_its_last_chunk_and_only_once(tmp_path):
    uploads = Uploads(tmp_path)
    uploads.begin("d", offer(), limit=len(DATA))
    results = [uploads.add("d", chunk, 0.0) for chunk in [*chunks(), *chunks()]]
    assert [result for result in results if result] == [(offer(), DATA)]
    assert results.index((offer(), DATA)) == 9


def test_a_chunk_that_nobody_announced_is_not_taken(tmp_path):
    assert Uploads(tmp_path).add("stranger", chunks()[0], 0.0) is None
