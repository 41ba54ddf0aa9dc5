"""A run in PostgreSQL: another machine takes it over, two servers never have it, a lost database ends one."""

from contextlib import closing

import pytest
from crashing import KILLED, Crash, devices, look, serve
from fleets import Fleet, Thread
from postgres import Postgres
from quadrants import quadrants

from edge_sdk import Bundle
from edge_sdk.cli import main
from edge_sdk.errors import RunError
from edge_sdk.tensors import encode
from edge_server import RunConfig, Server
from edge_server.replay import replay
from edge_server.store import Store
from edge_simulation.broker import MosquittoBroker


@pytest.fixture(scope="module")
def postgres():
    with Postgres() as running:
        yield running


@pytest.fixture
def url(postgres):
    return postgres.database()


@pytest.fixture
def mosquitto():
    with MosquittoBroker() as broker:
        yield broker


def held(tmp_path, url, *, name="one", fleet="f"):
    store = Store(tmp_path / name, url)
    store.take(fleet)
    return store


def test_a_second_server_is_refused_from_another_machine_too(tmp_path, url):
    first, second = held(tmp_path, url), Store(tmp_path / "two", url)
    with pytest.raises(RunError, match="another server serves fleet f with this database"):
        second.take("f")
    second.close()
    first.close()


def test_servers_of_two_fleets_share_a_database(tmp_path, url):
    first, second = held(tmp_path, url), held(tmp_path, url, name="two", fleet="g")
    for store, fleet in ((first, "f"), (second, "g")):
        store.begin(RunConfig(fleet=fleet, rounds=1), b"bundle", b"model", b"state")
    assert [run.fleet for run in first.runs()] == ["f", "g"]
    first.close()
    second.close()


def test_a_fleet_is_free_again_after_the_close(tmp_path, url):
    held(tmp_path, url).close()
    held(tmp_path, url, name="two").close()


def test_a_session_that_the_database_ends_ends_the_server(tmp_path, url, postgres):
    store = held(tmp_path, url)
    postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name(url)}'")
    for sentence in ("the store is lost .* the same command goes on", "not held by this server"):
        with pytest.raises(RunError, match=sentence) as error:
            store.begin(RunConfig(fleet="f", rounds=1), b"bundle", b"model", b"state")
        assert "\n" not in str(error.value)
    store.close()


def name(url):
    return url.rpartition("/")[2]


def test_a_database_that_has_gone_is_named_at_the_start(tmp_path):
    with pytest.raises(RunError, match="cannot be opened") as error:
        Store(tmp_path, "postgresql://edge@127.0.0.1:1/none")
    assert "\n" not in str(error.value)


def test_a_database_that_restarts_ends_the_run_with_a_sentence_and_the_same_call_goes_on(
    tmp_path, norm, postgres
):
    url = postgres.database()
    settings = {"rounds": 6, "participants": 2, "min_devices": 2}
    with Fleet(tmp_path) as fleet:
        lines = []

        def restart(result):
            lines.append(result.round)
            if result.round == 2:
                postgres.stop()
                postgres.start()

        first = server_of(fleet, norm, url, settings, on_round=restart)
        for device in "ab":
            fleet.device(device, quadrants(16, seed=ord(device)))
        with pytest.raises(RunError, match="the store is lost"):
            first.result()
        again = server_of(fleet, norm, url, settings, on_round=lambda r: lines.append(r.round))
        outcome = again.result()
        assert sorted(set(lines)) == list(range(1, 7))
        assert outcome.finished
    assert encode(outcome.bundle.weights) == encode(undisturbed(tmp_path, norm, settings).weights)
    with closing(Store(tmp_path, url, exclusive=False)) as store:
        assert all(replayed.same for replayed in replay(store, store.runs()[0]))


def server_of(fleet, bundle, url, settings, *, on_round):
    server = Server(
        bundle,
        fleet.config(**settings),
        broker=fleet.broker.transport(),
        work_dir=fleet.folder / "server",
        store=url,
        on_round=on_round,
    )
    return Thread(server.run)


def undisturbed(tmp_path, bundle, settings):
    """The same run in SQLite."""
    (tmp_path / "undisturbed").mkdir()
    with Fleet(tmp_path / "undisturbed") as fleet:
        _, server = fleet.serve(bundle, **settings)
        for device in "ab":
            fleet.device(device, quadrants(16, seed=ord(device)))
        return server.result().bundle


def test_another_machine_goes_on_with_the_run_of_one_that_died(tmp_path, norm, url, mosquitto):
    config = RunConfig(
        **{"fleet": "f", "rounds": 3, "participants": 2, "min_devices": 2, "lr": 0.1, "batch_size": 8},
        **{"evaluation": "none", "keep_updates": True, "strategy": "fedavgm"},
    )
    data = {name: quadrants(16, seed=ord(name)) for name in "ab"}
    norm.write(tmp_path / "model.edge")
    here, there = tmp_path / "here", tmp_path / "there"
    with devices(data, fleet="f", broker=mosquitto.url, folder=tmp_path / "devices"):
        at = {"broker": mosquitto.url, "url": url}
        status = serve(tmp_path / "model.edge", config, folder=here, crash=Crash(10, after=True), **at)
        assert status == KILLED
        before = look(here, url)
        assert (before.round, before.ended) == (1, False)
        assert serve(tmp_path / "model.edge", config, folder=there, **at) == 0
    after = look(there, url)
    assert after.runs == before.runs
    assert after.ended
    with closing(Store(there, url, exclusive=False)) as store:
        assert [replayed.same for replayed in replay(store, store.runs()[0])] == [True] * 3


def test_runs_and_replay_need_no_work_folder_where_the_run_is_in_a_database(
    tmp_path, norm, url, capsys, monkeypatch
):
    settings = {"rounds": 2, "participants": 1}
    with Fleet(tmp_path) as fleet:
        server = server_of(fleet, norm, url, settings, on_round=lambda _: None)
        fleet.device("a", quadrants(16))
        trained = server.result().bundle
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["runs", "--store", url, "--out", "trained.edge"]) == 0
    assert "2/2  ended" in capsys.readouterr().out
    assert Bundle.read("trained.edge").sha256 == trained.sha256
    assert main(["replay", "--store", url]) == 0
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()] == [["same", "bits"]] * 2
    assert main(["replay", "--store", url, "--run", "none"]) == 2
    assert "no one run in this database whose id begins with none" in capsys.readouterr().err
    assert [path.name for path in elsewhere.iterdir()] == ["trained.edge"]
