"""A device's work folder: kept over restarts, whole, one client's."""

import os

import pytest
from disks import full_disk

from edge_sdk.errors import ProtocolError, RunError
from edge_sdk.protocol import reference
from edge_sdk.protocol.messages import Offer
from edge_sdk.tensors import sha256
from edge_sdk.workspace import KEPT_BLOBS, Newest, Workspace


def offer_of(data, run="a" * 32, round_number=2, attempt=1, hop=0):
    ref = reference(data)
    return Offer(run=run, round=round_number, attempt=attempt, hop=hop, kind="train", blob=ref, examples=5)


def reopened(space):
    space.close()
    return Workspace(space.path)


@pytest.fixture
def space(tmp_path):
    opened = Workspace(tmp_path / "device")
    yield opened
    opened.close()


def test_an_id_is_made_once_and_kept(space):
    made = space.device_id(None)
    assert reopened(space).device_id(None) == made


def test_the_apps_own_id_wins(space):
    space.device_id(None)
    assert space.device_id("mine") == "mine"


def test_an_id_that_may_not_stand_in_a_topic_is_refused(space):
    with pytest.raises(ProtocolError, match="not allowed"):
        space.device_id("a/b")


def test_two_folders_are_two_installs(space, tmp_path):
    other = Workspace(tmp_path / "other")
    assert other.install != space.install
    assert reopened(other).install == other.install


def test_a_second_client_is_told_that_the_folder_is_in_use(space):
    with pytest.raises(RunError, match="in use by another device"):
        Workspace(space.path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="file/device cannot be used"):
        Workspace(tmp_path / "file" / "device")


def test_a_blob_is_found_by_its_sha256(space):
    assert space.blob(space.keep(b"model")) == b"model"


def test_a_damaged_blob_is_as_good_as_none(space):
    digest = space.keep(b"model")
    (space.path / "blobs" / digest).write_bytes(b"mode")
    assert space.blob(digest) is None
    assert not (space.path / "blobs" / digest).exists()


@pytest.mark.parametrize("digest", ["../../etc/passwd", "A" * 64, "0" * 63, ""])
def test_what_is_no_hash_names_no_file(space, digest):
    with pytest.raises(ProtocolError, match="not a SHA-256"):
        space.blob(digest)


def test_the_least_recently_used_blob_goes_first(space):
    digests = []
    for number in range(KEPT_BLOBS):
        digests.append(space.keep(bytes([number])))
        os.utime(space.path / "blobs" / digests[-1], (number, number))
    space.blob(digests[0])
    space.keep(b"one more")
    assert space.blob(digests[0]) is not None
    assert space.blob(digests[1]) is None


def test_what_is_referenced_is_never_removed(space):
    bundle, model = space.keep(b"bundle"), space.keep(b"model")
    space.set_newest(Newest(bundle, model))
    space.set_pending(offer_of(b"update"), b"update")
    for path in (space.path / "blobs").iterdir():
        os.utime(path, (0, 0))
    for number in range(3 * KEPT_BLOBS):
        space.keep(bytes([number]))
    assert all(space.blob(digest) for digest in (bundle, model, sha256(b"update")))


def test_the_number_of_blobs_is_bounded(space):
    for number in range(50):
        space.keep(bytes([number]))
    assert len(list((space.path / "blobs").iterdir())) <= KEPT_BLOBS


def test_a_finished_update_survives_a_restart(space):
    space.set_pending(offer_of(b"update"), b"update")
    again = reopened(space)
    assert again.pending == offer_of(b"update")
    assert again.blob(again.pending.blob.hash) == b"update"


def test_an_update_with_a_receipt_is_forgotten(space):
    space.set_pending(offer_of(b"update"), b"update")
    space.clear_pending(accepted=True)
    space.clear_pending(accepted=True)
    assert space.pending is None


@pytest.mark.parametrize("accepted", [True, False])
def test_what_a_codec_has_lost_is_made_up_for_only_if_the_update_counts(space, accepted):
    space.set_pending(offer_of(b"first"), b"first", residual=b"lost of the first")
    space.clear_pending(accepted=True)
    space.set_pending(offer_of(b"second"), b"second", residual=b"lost of the second")
    space = reopened(space)
    space.clear_pending(accepted=accepted)
    following = offer_of(b"third", round_number=3)
    assert space.residual(following) == (b"lost of the second" if accepted else b"lost of the first")
    assert space.residual(offer_of(b"third", run="b" * 32)) is None
    space.close()


def test_a_residual_belongs_to_the_update_that_it_came_with(space):
    space.set_pending(offer_of(b"first"), b"first", residual=b"lost of the first")
    space.set_pending(offer_of(b"second"), b"second")
    space.clear_pending(accepted=True)
    assert space.residual(offer_of(b"third", round_number=3)) is None


@pytest.mark.parametrize("text", [b"", b"{", b"{}", b"\xff", b'{"type":"join"}', b"[" * 5000])
def test_a_damaged_note_counts_as_none(space, text):
    (space.path / "pending.json").write_bytes(text)
    (space.path / "newest.json").write_bytes(text)
    assert (space.pending, space.newest) == (None, None)


def handed_in(space, *, round_number, attempt=0, left, accepted=True, hop=0):
    """Keep an update that leaves ``left`` as residual and as velocity, and give it its receipt."""
    data = f"update {round_number} {attempt} {hop}".encode()
    offer = offer_of(data, round_number=round_number, attempt=attempt, hop=hop)
    space.set_pending(offer, data, residual=left, velocity=left + b" velocity")
    space.clear_pending(accepted=accepted)


def begun_with(space, round_number, attempt=0):
    """The residual and the velocity that an update would begin with."""
    work = offer_of(b"next", round_number=round_number, attempt=attempt)
    return space.residual(work), space.velocity(work)


def test_the_velocity_of_an_update_that_is_refused_does_not_go_on(space):
    handed_in(space, round_number=1, left=b"first")
    handed_in(space, round_number=2, left=b"second", accepted=False)
    assert begun_with(space, 3) == (b"first", b"first velocity")


def test_an_update_that_was_never_handed_in_leaves_nothing(space):
    handed_in(space, round_number=1, left=b"first")
    space.set_pending(offer_of(b"second"), b"second", residual=b"lost", velocity=b"moved")
    assert begun_with(reopened(space), 2) == (b"first", b"first velocity")


@pytest.mark.parametrize("turns", [1, 2])
def test_a_round_that_is_repeated_begins_with_what_was_there_before_it(space, turns):
    handed_in(space, round_number=1, left=b"first")
    for hop in range(turns):
        handed_in(space, round_number=2, left=b"thrown away", hop=hop)
    space = reopened(space)
    assert begun_with(space, 2, attempt=1) == (b"first", b"first velocity")
    handed_in(space, round_number=2, attempt=1, left=b"thrown away too")
    handed_in(space, round_number=2, attempt=2, left=b"third attempt")
    assert begun_with(space, 2, attempt=3) == (b"first", b"first velocity")
    assert begun_with(space, 3) == (b"third attempt", b"third attempt velocity")
    space.close()


def test_the_turns_of_a_chain_go_on_from_one_another(space):
    handed_in(space, round_number=1, left=b"turn 0")
    assert begun_with(space, 1) == (b"turn 0", b"turn 0 velocity")


def test_a_receipt_that_comes_again_after_a_crash_changes_nothing(space):
    handed_in(space, round_number=1, left=b"first")
    data = b"second"
    offer = offer_of(data, round_number=2, attempt=0)
    space.set_pending(offer, data, residual=b"lost")
    note = (space.path / "pending.json").read_bytes()
    space.clear_pending(accepted=True)
    (space.path / "pending.json").write_bytes(note)
    space.clear_pending(accepted=True)
    assert begun_with(space, 2, attempt=1) == (b"first", b"first velocity")
    assert begun_with(space, 3) == (b"lost", None)


def test_what_rounds_hand_on_is_never_removed(space):
    handed_in(space, round_number=1, left=b"first")
    handed_in(space, round_number=2, left=b"second")
    for number in range(3 * KEPT_BLOBS):
        space.keep(bytes([number]))
    assert begun_with(space, 3) == (b"second", b"second velocity")
    assert begun_with(space, 2, attempt=1) == (b"first", b"first velocity")


@pytest.mark.parametrize("now", [0, 4 * 10**9], ids=["1970", "2096"])
def test_whatever_the_clock_says_what_was_just_kept_is_not_removed(space, now):
    for number in range(KEPT_BLOBS):
        digest = space.keep(bytes([number]))
        os.utime(space.path / "blobs" / digest, (now, now))
        now += 1
    # Files that are made now are newer than those, or older.
    bundle = space.keep(b"bundle")
    space.keep(b"model")
    assert space.blob(bundle) == b"bundle"


def test_the_open_bundle_is_never_removed(space):
    space.open_bundle = space.keep(b"bundle")
    for number in range(3 * KEPT_BLOBS):
        space.keep(bytes([number]))
    assert space.blob(space.open_bundle) == b"bundle"


def test_a_file_that_a_crash_left_unfinished_is_removed(space):
    for folder in (space.path, space.path / "blobs"):
        (folder / ".name.01234567").write_bytes(b"half")
    again = reopened(space)
    assert not list(again.path.rglob(".*"))
    again.close()


def test_a_full_disk_is_told_of_without_a_path_and_leaves_what_was_there(space):
    space.set_pending(offer_of(b"update"), b"update")
    with full_disk(), pytest.raises(RunError, match=r"work folder cannot be written: .* make room") as told:
        space.set_pending(offer_of(bytes(5000)), bytes(5000))
    assert str(space.path) not in str(told.value)
    assert space.pending == offer_of(b"update")
