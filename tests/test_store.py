"""The durable state: one server a folder, transactions whole, nothing forgotten that is still needed."""

import sqlite3

import pytest

from edge_sdk.errors import RunError
from edge_sdk.protocol import reference
from edge_sdk.protocol.messages import Offer
from edge_sdk.tensors import sha256
from edge_server import RunConfig
from edge_server.rows import AcceptedResult, RoundRow, WorkKey
from edge_server.store import Store

CONFIG = RunConfig(fleet="f", rounds=3, lr=0.1, bounds={"mean": 5}, participants=0.5)


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "run")
    yield opened
    opened.close()


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


def aggregate(store, row, number, *, keep=False):
    store.aggregate(
        row,
        model=b"model %d" % number,
        state=b"state %d" % number,
        old_state=sha256(b"state %d" % (number - 1)),
        keep=keep,
    )


def test_a_run_comes_back_as_it_was_begun(store, tmp_path):
    run = begin(store)
    store.close()
    again = Store(tmp_path / "run")
    assert again.runs("f") == [run]
    assert again.get(run.id).config == CONFIG
    assert has(again, b"bundle")


def test_another_fleets_run_is_not_ours(store):
    begin(store)
    assert store.runs("other") == []


def test_a_second_server_on_the_same_folder_is_refused(store, tmp_path):
    with pytest.raises(RunError, match="another server is running"):
        Store(tmp_path / "run")


def test_a_reader_may_look_while_a_server_runs(store, tmp_path):
    run = begin(store)
    reader = Store(tmp_path / "run", exclusive=False)
    assert reader.runs() == [run]
    reader.close()


def test_a_reader_makes_no_store(tmp_path):
    with pytest.raises(RunError, match="cannot be opened"):
        Store(tmp_path, exclusive=False)
    Store(tmp_path).close()


def test_the_folder_is_free_again_after_the_close(store, tmp_path):
    store.close()
    Store(tmp_path / "run").close()


def test_a_store_of_another_schema_is_refused_and_given_back(store, tmp_path):
    store.close()
    with sqlite3.connect(tmp_path / "run" / "edge.sqlite") as database:
        database.execute("UPDATE meta SET schema = 99")
    for _ in range(2):
        with pytest.raises(RunError, match="schema 99, this server reads 3") as error:
            Store(tmp_path / "run")
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


def test_sqlite_is_asked_to_survive_a_power_cut(store, tmp_path):
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


def test_an_aggregation_changes_model_state_and_round_together(store):
    run = begin(store)
    row = open_round(store, run)
    aggregate(store, row, 1)
    after = store.get(run.id)
    assert (after.round, after.model, after.state) == (1, sha256(b"model 1"), sha256(b"state 1"))
    assert store.rounds(run.id)[0].status == "aggregated"
    assert store.rounds(run.id)[0].model_after == sha256(b"model 1")


def test_an_aggregation_that_fails_changes_nothing(store, tmp_path):
    run = begin(store)
    row = open_round(store, run)
    accept(store, row, "a", b"update")
    with sqlite3.connect(tmp_path / "run" / "edge.sqlite") as database:
        database.execute("CREATE TRIGGER t BEFORE DELETE ON blobs BEGIN SELECT RAISE(ABORT, 'full'); END")
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
    store.aggregate(row, model=b"model 0", state=b"state 0", old_state=run.state, keep=False)
    assert has(store, b"model 0")
    assert has(store, b"state 0")


def test_a_damaged_blob_is_an_error_and_not_a_model(store, tmp_path):
    run = begin(store)
    with sqlite3.connect(tmp_path / "run" / "edge.sqlite") as database:
        database.execute("UPDATE blobs SET data = x'00' WHERE hash = ?", (run.model,))
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
    store.aggregate(second, model=b"model 1", state=b"state 1", old_state=run.state, keep=False)
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
