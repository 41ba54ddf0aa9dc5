"""The durable state: one server a folder, transactions whole, nothing forgotten that is still needed."""

import sqlite3

import pytest
import sqlalchemy as sa
from postgres import Postgres

from edge_sdk.errors import RunError
from edge_sdk.protocol import reference
from edge_sdk.protocol.messages import Offer, Taken
from edge_sdk.tensors import sha256
from edge_server import RunConfig, blobs
from edge_server.rows import AcceptedResult, RoundRow, WorkKey
from edge_server.store import Store

CONFIG = RunConfig(fleet="f", rounds=3, lr=0.1, bounds={"mean": 5}, participants=0.5)


@pytest.fixture(scope="module")
def postgres():
    with Postgres() as running:
        yield running


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    """Of an empty database."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").database()
    return f"sqlite:///{tmp_path / 'elsewhere.sqlite'}"


@pytest.fixture
def store(tmp_path, url):
    opened = Store(tmp_path / "run", url)
    opened.take("f")
    yield opened
    opened.close()


def meddle(url, *statements):
    """Do to the database what no server does."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    engine.dispose()


def begin(store, config=CONFIG):
    return store.begin(config, b"bundle", b"model 0", b"state 0")


def open_round(store, run, number=1, attempt=0, before=b"model 0"):
    row = RoundRow(
        run=run.id,
        round=number,
        attempt=attempt,
        kind="train",
        status="open",
        wanted=2,
        selected=["a", "b"],
        chains=[],
        exponents={"mean": 30},
        model_before=sha256(before),
        model_after=None,
        figures=None,
    )
    store.open_round(row)
    return row


def accept(store, row, device, data):
    offer = Offer(
        run=row.run,
        round=row.round,
        attempt=row.attempt,
        kind=row.kind,
        blob=reference(data),
        examples=9,
    )
    store.accept(device, offer, data, counted=row.round)


def has(store, data):
    try:
        return store.blob(sha256(data)) == data
    except RunError:
        return False


def aggregate(store, row, number, *, keep=False, **bounds):
    store.aggregate(
        row,
        RunConfig(fleet="f", rounds=9, keep_updates=keep, **bounds),
        model=b"model %d" % number,
        state=b"state %d" % number,
        old_state=sha256(b"state %d" % (number - 1)),
    )


def test_a_run_comes_back_as_it_was_begun_on_another_machine_too(store, tmp_path, url):
    run = begin(store)
    store.close()
    again = Store(tmp_path / "other", url)
    assert again.runs("f") == [run]
    assert again.get(run.id).config == CONFIG
    assert has(again, b"bundle")
    again.close()


def test_another_fleets_run_is_not_ours(store):
    begin(store)
    assert store.runs("other") == []


def test_a_second_server_on_the_same_folder_is_refused(store, tmp_path):
    with pytest.raises(RunError, match="another server is running"):
        Store(tmp_path / "run")


def test_a_reader_may_look_while_a_server_runs(store, tmp_path, url):
    run = begin(store)
    reader = Store(tmp_path / "run", url, exclusive=False)
    assert reader.runs() == [run]
    reader.close()


def test_a_reader_makes_no_store(tmp_path, url):
    with pytest.raises(RunError, match="cannot be opened"):
        Store(tmp_path, url, exclusive=False)
    Store(tmp_path, url).close()


def test_a_reader_writes_nothing(store, tmp_path, url):
    reader = Store(tmp_path / "run", url, exclusive=False)
    with pytest.raises(RunError, match="not held by this server"):
        begin(reader)
    reader.close()


def test_the_folder_is_free_again_after_the_close(store, tmp_path):
    store.close()
    Store(tmp_path / "run").close()


def test_a_store_of_another_schema_is_refused_and_given_back(store, tmp_path, url):
    store.close()
    meddle(url, "UPDATE meta SET schema = 99")
    for _ in range(2):
        with pytest.raises(RunError, match="schema 99, this server reads 3") as error:
            Store(tmp_path / "run", url)
        assert "new --work-dir" in str(error.value)


def test_a_file_that_is_no_database_is_refused_on_one_line(tmp_path):
    (tmp_path / "edge.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(RunError, match="cannot be opened") as error:
        Store(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be used"):
        Store(tmp_path / "file" / "run")


def test_a_url_of_no_database_is_refused(tmp_path):
    with pytest.raises(RunError, match="cannot be opened"):
        Store(tmp_path, "nosuch://host/db")


def test_sqlite_is_asked_to_survive_a_power_cut(tmp_path):
    Store(tmp_path / "run").close()
    with sqlite3.connect(tmp_path / "run" / "edge.sqlite") as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_an_accepted_update_is_there_with_its_bytes(store):
    row = open_round(store, begin(store))
    accept(store, row, "b", b"update b")
    accept(store, row, "a", b"update a")
    assert store.results(row) == [
        AcceptedResult("a", sha256(b"update a"), 9, 8, round=1),
        AcceptedResult("b", sha256(b"update b"), 9, 8, round=1),
    ]
    assert has(store, b"update a")


def test_a_second_update_of_a_device_leaves_nothing_behind(store):
    row = open_round(store, begin(store))
    accept(store, row, "a", b"first")
    with pytest.raises(RunError, match="cannot be written"):
        accept(store, row, "a", b"second")
    assert not has(store, b"second")
    assert [u.hash for u in store.results(row)] == [sha256(b"first")]


BREAK_DELETES = {
    "sqlite": ["CREATE TRIGGER t BEFORE DELETE ON blobs BEGIN SELECT RAISE(ABORT, 'full'); END"],
    "postgresql": [
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'full'; END $$",
        "CREATE TRIGGER t BEFORE DELETE ON blobs FOR EACH ROW EXECUTE FUNCTION f()",
    ],
}


def test_an_aggregation_changes_model_state_and_round_together(store):
    run = begin(store)
    row = open_round(store, run)
    aggregate(store, row, 1)
    after = store.get(run.id)
    assert (after.round, after.model, after.state) == (1, sha256(b"model 1"), sha256(b"state 1"))
    assert store.rounds(run.id)[0].status == "aggregated"
    assert store.rounds(run.id)[0].model_after == sha256(b"model 1")


def test_an_aggregation_that_fails_changes_nothing(store, url):
    run = begin(store)
    row = open_round(store, run)
    accept(store, row, "a", b"update")
    meddle(url, *BREAK_DELETES[url.partition(":")[0]])
    with pytest.raises(RunError, match="nothing is lost"):
        aggregate(store, row, 1)
    assert store.get(run.id) == run
    assert store.rounds(run.id)[0].status == "open"
    assert not has(store, b"model 1")


def test_updates_are_forgotten_after_the_round(store):
    row = open_round(store, begin(store))
    accept(store, row, "a", b"update")
    aggregate(store, row, 1)
    assert not has(store, b"update")
    assert [u.device for u in store.results(row)] == ["a"]


def test_updates_are_kept_where_the_run_keeps_them(store):
    row = open_round(store, begin(store))
    accept(store, row, "a", b"update")
    aggregate(store, row, 1, keep=True)
    assert has(store, b"update")


def test_a_kept_update_outlives_a_repeated_round_with_the_same_bytes(store):
    run = begin(store)
    first = open_round(store, run)
    accept(store, first, "a", b"update")
    aggregate(store, first, 1, keep=True)
    second = open_round(store, run, number=2, before=b"model 1")
    accept(store, second, "a", b"update")
    store.repeat(second)
    assert has(store, b"update")


def test_a_repeated_attempt_keeps_its_row_and_drops_its_updates(store):
    run = begin(store)
    row = open_round(store, run)
    accept(store, row, "a", b"update")
    store.repeat(row)
    open_round(store, run, attempt=1)
    assert [(r.attempt, r.status) for r in store.rounds(run.id)] == [(0, "repeated"), (1, "open")]
    assert not has(store, b"update")


def test_the_first_model_of_one_run_outlives_the_rounds_of_another(store):
    mine = begin(store)
    other = begin(store, RunConfig(fleet="other", rounds=3))
    aggregate(store, open_round(store, mine), 1)
    assert has(store, b"model 0")
    assert store.blob(store.get(other.id).state) == b"state 0"


def test_a_model_that_did_not_change_is_not_forgotten(store):
    run = begin(store)
    row = open_round(store, run)
    store.aggregate(row, CONFIG, model=b"model 0", state=b"state 0", old_state=run.state)
    assert has(store, b"model 0")
    assert has(store, b"state 0")


def test_a_damaged_blob_is_an_error_and_not_a_model(store, url):
    run = begin(store)
    meddle(url, f"UPDATE blobs SET data = substr(data, 2) WHERE hash = '{run.model}'")
    with pytest.raises(RunError, match="has lost blob"):
        store.blob(run.model)


def test_replacements_are_recorded(store):
    run = begin(store)
    store.set_selected(open_round(store, run), ["a", "b", "c"])
    assert store.rounds(run.id)[0].selected == ["a", "b", "c"]


def test_figures_come_back(store):
    run = begin(store)
    store.set_figures(open_round(store, run), {"accuracy": 0.1, "round": 1, "loss": None})
    assert store.rounds(run.id)[0].figures == {"accuracy": 0.1, "round": 1, "loss": None}


def test_what_is_on_the_broker_is_remembered_by_fleet(store):
    refs = [reference(b"one"), reference(b"two")]
    store.set_published("f", refs)
    store.set_published("other", [])
    assert sorted(store.published("f"), key=lambda r: r.hash) == sorted(refs, key=lambda r: r.hash)
    store.set_published("f", [])
    assert store.published("f") == []


def test_an_unknown_run_is_named(store):
    with pytest.raises(RunError, match="no run nothing"):
        store.get("nothing")


def test_bytes_that_an_attempt_and_its_repetition_share_are_not_kept(store):
    run = begin(store)
    first = open_round(store, run)
    accept(store, first, "a", b"the same")
    store.repeat(first)
    second = open_round(store, run, attempt=1)
    accept(store, second, "a", b"the same")
    store.aggregate(second, CONFIG, model=b"model 1", state=b"state 1", old_state=run.state)
    assert not has(store, b"the same")


@pytest.mark.parametrize("ends", [True, False])
def test_descriptions_go_with_their_run(store, ends):
    run = begin(store)
    key = WorkKey(run.id, 0, 0, "describe")
    accept(store, key, "a", b"description")
    assert has(store, b"description")
    if ends:
        store.end(run.id)
    else:
        store.forget(run.id)
    assert not has(store, b"description")
    assert store.results(key) == []


def test_devices_are_in_the_order_of_bytes_whatever_the_databases_locale(store):
    row = open_round(store, begin(store))
    for device in ("a", "B", "a-b", "aa", "A.1"):
        accept(store, row, device, device.encode())
    assert [result.device for result in store.results(row)] == ["A.1", "B", "a", "a-b", "aa"]


@pytest.mark.parametrize("size", [0, 1, blobs.PIECE, 2 * blobs.PIECE + 3])
def test_bytes_of_any_size_come_back_and_go_whole(store, url, size):
    row = open_round(store, begin(store))
    data = bytes(range(251)) * (size // 251 + 1)
    accept(store, row, "a", data[:size])
    assert store.blob(sha256(data[:size])) == data[:size]
    aggregate(store, row, 1)
    with pytest.raises(RunError, match="has lost blob"):
        store.blob(sha256(data[:size]))
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        left = connection.execute(sa.text("SELECT count(*) FROM blobs")).scalar()
    engine.dispose()
    assert left == 3


def test_a_blob_without_one_of_its_pieces_is_an_error(store, url):
    row = open_round(store, begin(store))
    data = bytes(blobs.PIECE + 1)
    accept(store, row, "a", data)
    meddle(url, f"DELETE FROM blobs WHERE piece = 1 AND hash = '{sha256(data)}'")
    with pytest.raises(RunError, match="has lost blob"):
        store.blob(sha256(data))


def test_a_run_whose_settings_are_mended_before_its_first_round_leaves_no_bytes(store):
    run = begin(store)
    store.forget(run.id)
    assert not has(store, b"bundle")
    assert not has(store, b"model 0")
    assert not has(store, b"state 0")


def test_the_bytes_of_another_run_stay_when_one_is_forgotten(store):
    begin(store)
    store.forget(begin(store).id)
    assert has(store, b"bundle")


def rounds_with_updates(store, count, **options):
    """A run of so many rounds; returns it."""
    run = begin(store)
    for number in range(1, count + 1):
        row = open_round(store, run, number=number, before=b"model %d" % (number - 1))
        accept(store, row, "a", b"update %d" % number)
        aggregate(store, row, number, keep=True, **options)
    return run


def test_the_updates_of_the_last_rounds_are_kept_with_what_replay_begins_with(store):
    run = rounds_with_updates(store, 4, keep_rounds=2)
    assert [has(store, b"update %d" % n) for n in range(1, 5)] == [False, False, True, True]
    assert [has(store, b"model %d" % n) for n in range(5)] == [False, False, True, True, True]
    assert [has(store, b"state %d" % n) for n in range(5)] == [False, False, True, True, True]
    befores = [row.state_before for row in store.rounds(run.id)]
    assert befores == [None, None, sha256(b"state 2"), sha256(b"state 3")]
    held = [[r.held for r in store.results(row)] for row in store.rounds(run.id)]
    assert held == [[False], [False], [True], [True]]


def kept_of(store, count):
    return [n for n in range(1, count + 1) if has(store, b"update %d" % n)]


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"keep_bytes": 16}, [3, 4]),
        ({"keep_bytes": 23}, [3, 4]),
        ({"keep_bytes": 24}, [2, 3, 4]),
        ({"keep_bytes": 1}, [4]),
        ({"keep_bytes": 1000}, [1, 2, 3, 4]),
        ({"keep_bytes": 24, "keep_rounds": 1}, [4]),
        ({"keep_bytes": 16, "keep_rounds": 3}, [3, 4]),
    ],
)
def test_as_many_rounds_are_kept_as_have_so_many_bytes_and_the_last_always(store, bounds, kept):
    run = rounds_with_updates(store, 4, **bounds)
    assert kept_of(store, 4) == kept
    befores = [row.round for row in store.rounds(run.id) if row.state_before is not None]
    assert befores == kept
    assert [n for n in range(4) if has(store, b"state %d" % n)] == [n - 1 for n in kept]


def test_a_large_round_pushes_out_all_before_it_and_not_itself(store):
    run, sizes = begin(store), [10, 10, 100, 10, 10]
    for number, size in enumerate(sizes, 1):
        row = open_round(store, run, number=number, before=b"model %d" % (number - 1))
        for device in "ab":
            accept(store, row, device, device.encode() * size + b"%d" % number)
        aggregate(store, row, number, keep=True, keep_bytes=50)
        held = [r.round for r in store.rounds(run.id) if r.state_before is not None]
        assert held == [[1], [1, 2], [3], [4], [4, 5]][number - 1]


def test_all_updates_are_kept_without_a_bound_and_no_models_of_the_past(store):
    rounds_with_updates(store, 3)
    assert all(has(store, b"update %d" % n) for n in range(1, 4))
    assert [has(store, b"model %d" % n) for n in range(4)] == [False, False, False, True]


def test_an_update_that_two_rounds_share_stays_as_long_as_one_of_them_is_kept(store):
    run = begin(store)
    for number in range(1, 4):
        row = open_round(store, run, number=number, before=b"model %d" % (number - 1))
        accept(store, row, "a", b"the same" if number < 3 else b"another")
        aggregate(store, row, number, keep=True, keep_rounds=2)
    assert has(store, b"the same")
    row = open_round(store, run, number=4, before=b"model 3")
    aggregate(store, row, 4, keep=True, keep_rounds=2)
    assert not has(store, b"the same")
    assert has(store, b"another")


@pytest.mark.parametrize(
    ("settings", "left"), [({}, {"b": 3}), ({"mode": "buffered", "max_staleness": 1}, {"a": 2, "b": 3})]
)
def test_what_devices_took_is_known_as_long_as_it_may_count(store, settings, left):
    run = begin(store)
    taken = {1: ["a", "b"], 2: ["a"], 3: ["b"]}
    for number, names in taken.items():
        row = open_round(store, run, number=number, before=b"model %d" % (number - 1))
        for device in names:
            task = Taken(run=run.id, round=number, attempt=0, kind="train", examples=number)
            store.declare(device, task)
        aggregate(store, row, number, **settings)
    assert store.begun(run.id, since=0) == left
    assert store.begun(run.id, since=3) == {"b": 3}


def test_a_server_whose_fleet_another_has_taken_over_writes_nothing(store, url):
    """Its lock is of no use where the database lost it, or where two machines share SQLite's file."""
    run = begin(store)
    row = open_round(store, run)
    meddle(url, "UPDATE fleets SET epoch = epoch + 1")
    with pytest.raises(RunError, match="another server has taken fleet f over"):
        accept(store, row, "a", b"update")
    assert store.results(row) == []
    assert not has(store, b"update")


def test_each_start_has_an_epoch_of_its_own(store, tmp_path, url):
    begin(store)
    store.close()
    again = Store(tmp_path / "other", url)
    again.take("f")
    begin(again)
    again.close()
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT name, epoch FROM fleets")).all() == [("f", 2)]
    engine.dispose()
