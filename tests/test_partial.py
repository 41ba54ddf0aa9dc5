"""An unfinished download on disk: what is kept, what is believed of it, and how much."""

import random

import pytest
from disks import full_disk

from edge_sdk.errors import ProtocolError, RunError
from edge_sdk.partial import FLUSH_EVERY, Partial
from edge_sdk.protocol import Incoming, chunk_count, decode_chunk, encode_chunk, reference
from edge_sdk.workspace import KEPT_PARTIALS, Workspace

DATA = random.Random(0).randbytes(40_000)
REF = reference(DATA, chunk=1024)
COUNT = chunk_count(REF)
CHUNKS = [decode_chunk(encode_chunk(REF, DATA, index)) for index in range(COUNT)]


def incoming_of(partial, ref=REF):
    return Incoming(ref, limit=len(DATA), storage=partial)


@pytest.fixture
def space(tmp_path):
    opened = Workspace(tmp_path / "device")
    yield opened
    opened.close()


def begun(folder, indices, ref=REF):
    """A download that has got these chunks and was closed."""
    partial = Partial(folder, ref)
    incoming = incoming_of(partial, ref)
    for index in indices:
        incoming.add(CHUNKS[index])
    partial.close()


def test_a_download_goes_on_where_it_was(tmp_path):
    begun(tmp_path, [0, 1, 2, 3, 9, COUNT - 1])
    incoming = incoming_of(Partial(tmp_path, REF))
    assert incoming.next_range(16) == (4, 9)
    assert incoming.received == 5 * 1024 + len(DATA) % 1024
    for chunk in CHUNKS:
        incoming.add(chunk)
    assert incoming.finish() == DATA


def test_a_crash_loses_only_what_came_after_the_last_flush(tmp_path):
    incoming = incoming_of(Partial(tmp_path, REF))
    for chunk in CHUNKS[: FLUSH_EVERY + 3]:
        incoming.add(chunk)
    # Nobody has closed the first.
    assert list(Partial(tmp_path, REF).held()) == list(range(FLUSH_EVERY))


@pytest.mark.parametrize("harm", ["data lost", "data cut", "data changed", "bits too many"])
def test_what_the_disk_says_wrongly_costs_one_repeat_of_the_download(tmp_path, harm):
    begun(tmp_path, range(20))
    data, bits = tmp_path / f"{REF.hash}.part", tmp_path / f"{REF.hash}.map"
    if harm == "data lost":
        data.unlink()
    elif harm == "data cut":
        data.write_bytes(data.read_bytes()[:5000])
    elif harm == "data changed":
        data.write_bytes(bytes(20 * 1024))
    else:
        bits.write_bytes(bits.read_bytes()[:16] + b"\xff" * 5)
    partial = Partial(tmp_path, REF)
    incoming = incoming_of(partial)
    for chunk in CHUNKS[len(list(partial.held())) :]:
        incoming.add(chunk)
    with pytest.raises(ProtocolError, match="SHA-256"):
        incoming.finish()
    assert incoming.next_range(COUNT) == (0, COUNT)
    for chunk in CHUNKS:
        assert incoming.add(chunk)
    assert incoming.finish() == DATA
    partial.close()


@pytest.mark.parametrize("text", [b"", b"\xff" * 3, b"\xff" * 100])
def test_a_damaged_map_counts_as_none(tmp_path, text):
    begun(tmp_path, range(20))
    (tmp_path / f"{REF.hash}.map").write_bytes(text)
    assert list(Partial(tmp_path, REF).held()) == []


def test_the_same_blob_cut_otherwise_begins_anew(tmp_path):
    begun(tmp_path, range(20))
    assert list(Partial(tmp_path, reference(DATA, chunk=1025)).held()) == []


def test_a_small_blob_is_not_kept_in_parts(space):
    assert space.partial(reference(bytes(FLUSH_EVERY * 1024), chunk=1024)) is None
    assert space.partial(reference(bytes(FLUSH_EVERY * 1024 + 1), chunk=1024)) is not None


def test_unfinished_downloads_are_bounded(space):
    refs = [reference(bytes([n]) * 40_000, chunk=1024) for n in range(5)]
    for ref in refs:
        partial = space.partial(ref)
        partial.put(0, bytes(1024))
        partial.close()
    names = {path.name for path in (space.path / "partial").iterdir()}
    assert len(names) == 2 * KEPT_PARTIALS
    assert {f"{refs[-1].hash}.part", f"{refs[-1].hash}.map"} < names


def test_nothing_in_parts_is_left_of_a_blob_that_is_whole(space):
    begun(space.path / "partial", range(20))
    space.keep(DATA)
    assert list((space.path / "partial").iterdir()) == []


def test_a_hash_that_is_none_names_no_file(space):
    with pytest.raises(ProtocolError, match="not a SHA-256"):
        space.partial(type(REF)(hash="../" * 21 + "a", size=1 << 20, chunk=1024))


def test_a_full_disk_is_told_of_without_a_path(tmp_path):
    partial = Partial(tmp_path, REF)
    with full_disk(), pytest.raises(RunError, match=r"work folder cannot be written: .* make room") as told:
        partial.put(20, bytes(1024))
    assert str(tmp_path) not in str(told.value)
