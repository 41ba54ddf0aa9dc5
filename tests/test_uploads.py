"""Uploads over a restart: what the disk keeps of them, of whom, what is believed of it, and how long."""

import random
from pathlib import Path

import pytest
from disks import full_disk
from fleets import FakeDevice, Fleet

from edge_sdk.errors import ProtocolError, RunError
from edge_sdk.protocol import Chunk, chunk_count, decode_chunk, encode_chunk, reference
from edge_sdk.protocol.messages import Grant, Offer
from edge_sdk.tensors import encode, sha256
from edge_server.uploads import STALL, WINDOW, Uploads

DATA = random.Random(0).randbytes(48 * 1024)
REF = reference(DATA, chunk=1024)
COUNT = chunk_count(REF)
CHUNKS = [decode_chunk(encode_chunk(REF, DATA, index)) for index in range(COUNT)]
FEW = reference(DATA[: WINDOW * 1024], chunk=1024)


def offer_of(ref, *, number=1):
    return Offer(run="a" * 32, round=number, attempt=0, kind="train", blob=ref, examples=1)


OFFER = offer_of(REF)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def begun(folder, *, device="d", offer=OFFER):
    """A server that expects one device's update."""
    uploads = Uploads(folder)
    uploads.begin(device, offer, limit=len(DATA))
    return uploads


def killed(folder, chunks, *, device="d"):
    """What a server leaves that is killed after it has taken these chunks."""
    uploads = begun(folder, device=device)
    for chunk in chunks:
        uploads.add(device, chunk, 0.0)


def granted(uploads):
    """All that the server asks for, each chunk when its turn has come."""
    asked, now = [], 0.0
    while grants := uploads.grants(now):
        for device, grant in grants:
            asked += [(device, index) for index in range(grant.start, grant.stop)]
            for index in range(grant.start, grant.stop):
                uploads.add(device, CHUNKS[index], now)
    return asked


def test_a_server_that_starts_again_grants_only_what_is_missing(tmp_path):
    killed(tmp_path, CHUNKS[WINDOW : 2 * WINDOW])
    missing = [*range(WINDOW), *range(2 * WINDOW, COUNT)]
    assert granted(begun(tmp_path)) == [("d", index) for index in missing]


def test_a_killed_server_loses_less_than_a_window(tmp_path):
    killed(tmp_path, CHUNKS[: WINDOW + WINDOW - 1])
    assert granted(begun(tmp_path))[0] == ("d", WINDOW)


def test_an_upload_that_went_on_is_whole_with_its_last_chunk(tmp_path):
    killed(tmp_path, CHUNKS[:WINDOW])
    uploads = begun(tmp_path)
    results = [uploads.add("d", chunk, 0.0) for chunk in CHUNKS[WINDOW:]]
    assert results == [None] * (COUNT - WINDOW - 1) + [(OFFER, DATA)]


def test_an_upload_of_which_all_had_come_is_whole_with_its_offer(tmp_path):
    killed(tmp_path, CHUNKS)
    uploads = Uploads(tmp_path)
    assert uploads.begin("d", OFFER, limit=len(DATA)) == (OFFER, DATA)
    assert uploads.grants(0.0) == []


def test_the_same_bytes_offered_under_another_key_go_on_too(tmp_path):
    killed(tmp_path, CHUNKS[:WINDOW])
    assert granted(begun(tmp_path, offer=offer_of(REF, number=2)))[0] == ("d", WINDOW)


@pytest.mark.parametrize("other", ["e", "D"])
def test_what_one_device_sent_is_not_anothers(tmp_path, other):
    killed(tmp_path, [Chunk(REF.hash, index, bytes(1024)) for index in range(WINDOW)], device=other)
    uploads = begun(tmp_path)
    uploads.begin(other, OFFER, limit=len(DATA))
    uploads.drop(other)
    assert granted(uploads) == [("d", index) for index in range(COUNT)]


def test_no_two_ids_share_a_folder_where_case_does_not_count(tmp_path):
    for device in ("d", "D"):
        killed(tmp_path, CHUNKS[:1], device=device)
    assert len({str(path).lower() for path in files(tmp_path)}) == 4


def test_what_was_kept_and_is_damaged_is_asked_for_again_and_no_fault_of_the_device(tmp_path):
    killed(tmp_path, CHUNKS[:WINDOW])
    (kept,) = [path for path in files(tmp_path) if path.suffix == ".part"]
    kept.write_bytes(bytes(WINDOW * 1024))
    uploads = begun(tmp_path)
    assert [uploads.add("d", chunk, 0.0) for chunk in CHUNKS[WINDOW:]] == [None] * (COUNT - WINDOW)
    assert [uploads.add("d", chunk, 0.0) for chunk in CHUNKS] == [None] * (COUNT - 1) + [(OFFER, DATA)]


def test_an_update_that_is_wrong_twice_is_the_devices_fault(tmp_path):
    forged = [Chunk(REF.hash, 0, bytes(1024)), *CHUNKS[1:]]
    killed(tmp_path, forged[:WINDOW])
    uploads = begun(tmp_path)
    for chunk in [*forged[WINDOW:], *forged[:-1]]:
        assert uploads.add("d", chunk, 0.0) is None
    with pytest.raises(ProtocolError, match="SHA-256"):
        uploads.add("d", forged[-1], 0.0)


def test_an_update_that_nothing_was_kept_of_may_be_wrong_once_only(tmp_path):
    uploads = begun(tmp_path)
    for chunk in CHUNKS[:-1]:
        uploads.add("d", chunk, 0.0)
    with pytest.raises(ProtocolError, match="SHA-256"):
        uploads.add("d", Chunk(REF.hash, COUNT - 1, bytes(1024)), 0.0)


def test_few_chunks_are_not_kept(tmp_path):
    uploads = begun(tmp_path, offer=offer_of(FEW))
    for index in range(WINDOW - 1):
        uploads.add("d", Chunk(FEW.hash, index, CHUNKS[index].data), 0.0)
    assert files(tmp_path) == []


def test_a_whole_update_is_on_disk_until_it_is_dropped(tmp_path):
    uploads = begun(tmp_path)
    assert [uploads.add("d", chunk, 0.0) for chunk in CHUNKS][-1] == (OFFER, DATA)
    assert len(files(tmp_path)) == 2
    uploads.drop("d")
    assert files(tmp_path) == []


def test_another_update_takes_the_place_of_the_one_before(tmp_path):
    killed(tmp_path, CHUNKS[:WINDOW])
    other = reference(DATA[1:], chunk=1024)
    begun(tmp_path, offer=offer_of(other))
    assert {path.stem for path in files(tmp_path)} == {other.hash}


def test_nothing_is_left_when_the_work_is_closed_of_a_server_before_neither(tmp_path):
    killed(tmp_path, CHUNKS[:WINDOW], device="gone for good")
    uploads = begun(tmp_path)
    uploads.add("d", CHUNKS[0], 0.0)
    uploads.clear()
    assert files(tmp_path) == []
    assert uploads.grants(STALL) == []


def test_a_full_disk_is_told_of_and_costs_nothing_that_has_come(tmp_path):
    uploads = begun(tmp_path)
    for chunk in CHUNKS[:WINDOW]:
        uploads.add("d", chunk, 0.0)
    with full_disk(), pytest.raises(RunError, match=r"nothing is lost: make room .* same command") as told:
        uploads.add("d", CHUNKS[WINDOW], 0.0)
    assert str(tmp_path) not in str(told.value)
    assert "device's" not in str(told.value)
    assert granted(begun(tmp_path))[0] == ("d", WINDOW)


def open_files():
    return len(list(Path("/dev/fd").iterdir()))


def test_no_file_stays_open(tmp_path):
    uploads, before = Uploads(tmp_path), open_files()
    for number in range(100):
        uploads.begin(f"d{number}", OFFER, limit=len(DATA))
        uploads.add(f"d{number}", CHUNKS[0], 0.0)
    assert len(files(tmp_path)) == 200
    assert open_files() == before


def step_of(bundle):
    return encode({name: tensor * 0 + 1 for name, tensor in bundle.weights.items()})


def test_a_work_folder_that_cannot_be_written_ends_the_run_which_then_goes_on(tmp_path, cnn):
    settings = {"chunk_bytes": 1024, "participants": 1, "min_devices": 1}
    data = step_of(cnn)
    blocked = tmp_path / "server" / "uploads"
    with Fleet(tmp_path) as fleet:
        blocked.parent.mkdir()
        blocked.write_text("in the way")
        _, first = fleet.serve(cnn, **settings)
        device = FakeDevice(fleet.broker, "d")
        device.join()
        task = device.task()
        device.take(task)
        device.offer(task, data)
        with pytest.raises(RunError, match=r"work folder cannot be written .* nothing is lost"):
            first.result()
        blocked.unlink()
        _, second = fleet.serve(cnn, **settings)
        device.join()
        assert device.hand_in(task, data).accepted
        device.end()
        assert second.result().finished
    assert not blocked.exists()


def test_an_update_that_is_refused_whole_leaves_no_file(tmp_path, cnn):
    wrong = bytes(len(step_of(cnn)))
    with Fleet(tmp_path) as fleet:
        server, thread = fleet.serve(cnn, chunk_bytes=1024)
        device = FakeDevice(fleet.broker, "d")
        device.join()
        task = device.task()
        device.take(task)
        offer = device.offer(task, wrong)
        grant = device.wait_for(Grant)
        kept = tmp_path / "server" / "uploads" / sha256(b"d")
        assert (kept / f"{offer.blob.hash}.map").exists()
        device.send_chunks(offer.blob, wrong, grant.start, grant.stop)
        assert not device.hand_in(task, wrong).accepted
        assert not kept.exists()
        server.stop()
        thread.result()
