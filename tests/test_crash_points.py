"""``kill -9`` before and after any commit of a run: the same command ends it with the same bits."""

from contextlib import closing
from itertools import count

import numpy as np
import pytest
from crashing import Crash, run_through
from quadrants import quadrants

from edge_sdk import Sharing
from edge_server import RunConfig
from edge_server.buffered import BufferedRound
from edge_server.replay import replay
from edge_server.rounds import round_row
from edge_server.rows import RunRow
from edge_server.store import Store
from edge_simulation.broker import MosquittoBroker

pytestmark = pytest.mark.timeout(7200)

LEAST = {"rounds": 2, "lr": 0.1, "batch_size": 8, "evaluation": "none", "keep_updates": True}
FEW = [Crash(1, False), Crash(3, True), Crash(7, False), Crash(4, True), Crash(8, True), Crash(6, False)]
"""One after another in one run; a start has one commit before it goes on where the last one was."""


@pytest.fixture(scope="module")
def mosquitto():
    with MosquittoBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def by_class():
    everything = quadrants(200, seed=5)
    return {
        f"d{label}": everything.take(np.flatnonzero(everything.labels == label)[: 12 + 6 * label])
        for label in range(4)
    }


class Kind:
    """One kind of run: plays it with crashes, and tells what it came to."""

    def __init__(self, folder, broker, bundle, data, settings, **options):
        self._folder, self._broker, self._bundle, self._data = folder, broker, bundle, data
        self._settings, self._options = {**LEAST, **settings}, options
        self._played = count()

    def play(self, *crashes):
        """How many of ``crashes`` there were, and the folder of the store."""
        name = f"{self._folder.name}-{next(self._played)}"
        config = RunConfig(fleet=name, **self._settings)
        folder = self._folder / name
        happened = run_through(
            self._bundle, config, self._data, crashes, broker=self._broker, folder=folder, **self._options
        )
        return happened, folder / "server"


def outcome(folder):
    """The attempts, their models and who took part, once all is checked that holds for every run."""
    with closing(Store(folder, exclusive=False)) as store:
        (run,) = store.runs()
        rows = store.rounds(run.id)
        assert run.ended
        assert run.round == run.config.rounds
        assert all(row.status == "aggregated" and row.attempt == 0 for row in rows)
        assert [row.round for row in rows if row.figures is None] == []
        assert all(replayed.same for replayed in replay(store, run))
        assert store.published(run.fleet) == []
        results = [[(r.device, r.hop, r.hash) for r in store.results(row)] for row in rows]
        return [(row.round, row.kind, row.chains, row.model_after) for row in rows], results


@pytest.fixture(scope="module")
def plain(tmp_path_factory, mosquitto, norm):
    settings = {"strategy": "fedavgm", "momentum": 0.5, "participants": 3, "min_devices": 3}
    data = {name: quadrants(24, seed=ord(name)) for name in "abc"}
    return Kind(tmp_path_factory.mktemp("plain"), mosquitto.url, norm, data, settings)


@pytest.fixture(scope="module")
def chained(tmp_path_factory, mosquitto, describing, by_class):
    settings = {
        **{"participants": 4, "min_devices": 4, "selection": "grouped", "chain": 2, "augmentation": 0.67},
        **{"strategy": "fedavgm", "calibration": "ccvr", "virtual_features": 50},
    }
    sharing = Sharing(histogram=True, descriptor=True, statistics=True, withhold_below=0)
    folder = tmp_path_factory.mktemp("chained")
    return Kind(folder, mosquitto.url, describing, by_class, settings, sharing=sharing)


@pytest.fixture(scope="module")
def buffered(tmp_path_factory, mosquitto, norm):
    settings = {"mode": "buffered", "participants": 3, "buffer": 2, "min_devices": 3, "rounds": 4}
    data = {name: quadrants(24, seed=ord(name)) for name in "abc"}
    return Kind(tmp_path_factory.mktemp("buffered"), mosquitto.url, norm, data, settings)


def test_a_buffer_that_nobody_was_asked_for_yet_asks_after_a_restart(paper):
    config = RunConfig(fleet="f", mode="buffered", participants=3, buffer=2, **LEAST)
    run = RunRow("run", "f", config, "bundle", "model", "state", round=0, ended=False, created=0.0)
    row = round_row(run, [], wanted=2, attempt=0, precision=config.precision(2))
    restored = BufferedRound.restore(run, paper, row, now=0.0)
    for device in "abcd":
        restored.cohort.volunteer(device)
    assert restored.cohort.call() == ["a", "b", "c"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "chained"])
def test_six_crashes_in_one_run_leave_no_trace_in_its_bits(kind, request):
    played = request.getfixturevalue(kind)
    _, undisturbed = played.play()
    happened, disturbed = played.play(*FEW)
    assert happened == len(FEW)
    assert outcome(disturbed) == outcome(undisturbed)


@pytest.mark.full
def test_six_crashes_in_the_buffered_mode_end_in_a_run_whose_replay_has_its_bits(buffered):
    happened, disturbed = buffered.play(*FEW)
    assert happened == len(FEW)
    assert len(outcome(disturbed)[0]) == 4


@pytest.mark.sweep
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["plain", "chained"])
def test_a_crash_at_any_commit_leaves_no_trace_in_the_bits(kind, after, request):
    played = request.getfixturevalue(kind)
    _, undisturbed = played.play()
    expected = outcome(undisturbed)
    for commit in count(1):
        happened, disturbed = played.play(Crash(commit, after))
        assert outcome(disturbed) == expected, commit
        if not happened:
            break


@pytest.mark.sweep
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_crash_at_any_commit_in_the_buffered_mode_ends_in_a_run_whose_replay_has_its_bits(buffered, after):
    for commit in count(1):
        happened, disturbed = buffered.play(Crash(commit, after))
        assert len(outcome(disturbed)[0]) == 4, commit
        if not happened:
            break
