"""A disk that fills up: the run stops with a sentence, has lost nothing, and goes on once there is room."""

from contextlib import closing, contextmanager

import pytest
import sqlalchemy as sa
from fleets import Fleet
from quadrants import quadrants

from edge_sdk.errors import RunError
from edge_sdk.tensors import encode
from edge_server.replay import replay
from edge_server.store import Store

SETTINGS = {"rounds": 4, "participants": 2, "min_devices": 2, "strategy": "fedavgm"}
NAMES = "ab"


@contextmanager
def room_for(pages):
    """SQLite's files that are opened meanwhile hold at most so many pages of 4 KB."""

    def limit(connection, _record):
        connection.execute(f"PRAGMA max_page_count = {pages}")

    sa.event.listen(sa.engine.Engine, "connect", limit)
    try:
        yield
    finally:
        sa.event.remove(sa.engine.Engine, "connect", limit)


def pages_of(folder):
    with closing(Store(folder, exclusive=False)) as store, store._database.reading() as connection:
        return connection.execute(sa.text("PRAGMA page_count")).scalar()


def run(folder, bundle, starts):
    """Start the server once for each of ``starts``, with room for so many pages; what the starts came to."""
    came_to = []
    with Fleet(folder) as fleet:
        for name in NAMES:
            fleet.device(name, quadrants(16, seed=ord(name)))
        for pages in starts:
            with room_for(pages):
                _, thread = fleet.serve(bundle, **SETTINGS)
                try:
                    came_to.append(thread.result())
                except RunError as error:
                    came_to.append(str(error))
    return came_to


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, norm):
    folder = tmp_path_factory.mktemp("undisturbed")
    (outcome,) = run(folder, norm, [1 << 20])
    Store(folder / "empty").close()
    return outcome, pages_of(folder / "empty"), pages_of(folder / "server")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_full_disk_stops_the_run_and_the_same_call_goes_on_once_there_is_room(
    tmp_path, norm, undisturbed, share
):
    expected, empty, filled = undisturbed
    room = empty + int(share * (filled - empty))
    stopped, still, outcome = run(tmp_path, norm, [room, room, 1 << 20])
    for sentence in (stopped, still):
        assert "database or disk is full" in sentence
        assert "nothing is lost: free the disk" in sentence
        assert "\n" not in sentence
    assert outcome.finished
    assert encode(outcome.bundle.weights) == encode(expected.bundle.weights)
    with closing(Store(tmp_path / "server", exclusive=False)) as store:
        (row,) = store.runs()
        assert [(r.round, r.attempt) for r in store.rounds(row.id)] == [(n, 0) for n in range(1, 5)]
        assert all(replayed.same for replayed in replay(store, row))


def test_a_disk_that_is_full_from_the_start_is_named(tmp_path, norm):
    (sentence,) = run(tmp_path, norm, [3])
    assert "cannot be opened" in sentence
    assert "disk is full" in sentence
