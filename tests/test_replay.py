"""Replay: a second definition of every codec and strategy, from the first round whose updates are kept."""

import ast
from contextlib import closing
from pathlib import Path

import pytest
from fleets import Fleet
from quadrants import quadrants

from edge_sdk.cli import main
from edge_sdk.errors import RunError
from edge_sdk.tensors import encode
from edge_server import RunConfig
from edge_server import replay as replay_module
from edge_server.replay import replay
from edge_server.store import Store

KEPT = {"participants": 2, "min_devices": 2, "keep_rounds": 2}
OTHERS = {
    "edge_sdk.codec",
    "edge_sdk.update",
    "edge_server.aggregation",
    "edge_server.buffered",
    "edge_server.chain",
    "edge_server.coordinator",
    "edge_server.rounds",
}


def run(folder, bundle, **settings):
    with Fleet(folder) as fleet:
        _, server = fleet.serve(bundle, **settings)
        for name in "ab":
            fleet.device(name, quadrants(16, seed=ord(name)))
        return server.result()


def replayed(folder):
    with closing(Store(folder / "server", exclusive=False)) as store:
        return [(line.round, line.same) for line in replay(store, store.runs()[-1])]


def test_replay_imports_nothing_that_the_coordinator_computes_with():
    tree = ast.parse(Path(replay_module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & OTHERS == set()


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fedavg"},
        {"strategy": "fedavgm"},
        {"strategy": "fedadam", "server_lr": 0.01},
        {"mode": "buffered", "buffer": 2},
        {"codec": "int8", "compression": "zstd"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_replay_begins_with_the_first_round_that_is_kept_and_has_the_same_bits(tmp_path, norm, settings):
    run(tmp_path, norm, rounds=5, **KEPT, **settings)
    assert replayed(tmp_path) == [(4, True), (5, True)]


def test_a_replay_begins_where_the_bytes_that_are_kept_do(tmp_path, norm):
    of_a_round = 2 * len(encode(norm.weights))
    run(tmp_path, norm, rounds=5, participants=2, min_devices=2, keep_bytes=3 * of_a_round - 1)
    assert replayed(tmp_path) == [(4, True), (5, True)]


def test_a_run_shorter_than_what_is_kept_is_replayed_from_its_bundle(tmp_path, norm):
    run(tmp_path, norm, rounds=2, **KEPT)
    assert replayed(tmp_path) == [(1, True), (2, True)]


def test_the_command_says_where_it_begins(tmp_path, norm, capsys):
    run(tmp_path, norm, rounds=3, **KEPT)
    assert main(["replay", "--work-dir", str(tmp_path / "server")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the updates before round 2 are forgotten: replay begins there"
    assert [line.split()[:2] for line in lines[1:]] == [["round", "2"], ["round", "3"]]


@pytest.mark.parametrize("bound", ["keep_rounds", "keep_bytes"])
def test_a_bound_without_updates_to_keep_is_refused(bound):
    with pytest.raises(RunError, match=bound):
        RunConfig(fleet="f", rounds=1, **{bound: 3}).check()


@pytest.mark.parametrize("command", ["runs", "replay"])
def test_a_command_that_is_told_of_no_store_says_how_to_name_one(command, capsys):
    assert main([command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--work-dir DIR, or --store URL" in line


def test_the_list_of_runs_shows_mode_and_state(tmp_path, norm, capsys):
    run(tmp_path, norm, rounds=2, mode="buffered", buffer=1, participants=2)
    assert main(["runs", "--work-dir", str(tmp_path / "server")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[3:] == ["f", "fedavg", "buffered", "2/2", "ended"]
