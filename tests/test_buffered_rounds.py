"""The buffered mode over a wire: so many updates make a model, and nobody is waited for (FedBuff)."""

import math
import sqlite3
import threading
from contextlib import closing
from fractions import Fraction

import numpy as np
import pytest
from fleets import FakeDevice, Fleet
from quadrants import quadrants
from waiting import until

from edge_sdk import RunError
from edge_sdk.protocol.messages import Cancel, Declined, Grant, Offer, Receipt, Taken, Task, key_of
from edge_sdk.tensors import encode
from edge_server import RunConfig, coordinator
from edge_server.buffered import share_of
from edge_server.replay import replay
from edge_server.store import Store

BUFFERED = {"mode": "buffered", "participants": 3, "buffer": 2}


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


def opened(fleet):
    store = Store(fleet.folder / "server", exclusive=False)
    return store, store.runs()[-1]


def step(bundle, value):
    """An update that moves every trainable weight down by ``value``."""
    rules = bundle.manifest.rules
    return {
        name: np.full_like(tensor, value if rules[name] == "mean" else 0)
        for name, tensor in bundle.weights.items()
    }


def devices(fleet, *names):
    made = [FakeDevice(fleet.broker, name) for name in names]
    for device in made:
        device.join()
    return made


def test_a_fleet_trains_and_its_replay_has_the_same_bits(fleet, norm):
    lines = []
    options = {"evaluation": "server", "eval_data": quadrants(100, seed=9), "lr": 0.2}
    _, server = fleet.serve(norm, rounds=8, min_devices=4, on_round=lines.append, **BUFFERED, **options)
    for number in range(4):
        fleet.device(f"d{number}", quadrants(20 + number, seed=number))
    outcome = server.result()
    assert [line.round for line in lines] == list(range(1, 9))
    assert all(line.participants == 2 and line.accuracy is not None for line in lines)
    assert outcome.rounds == tuple(lines)
    assert lines[-1].accuracy > lines[0].accuracy
    store, run = opened(fleet)
    assert [r.same for r in replay(store, run)] == [True] * 8


def test_a_slow_devices_update_counts_less_and_is_not_waited_for(fleet, norm):
    _, server = fleet.serve(norm, rounds=2, min_devices=3, **BUFFERED)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    for device, task in tasks.items():
        device.take(task)
    for device in (fast, other):
        assert device.hand_in(tasks[device], encode(step(norm, 1.0)), examples=10).accepted
    # The first model is made without the slow device, which goes on.
    second = fast.wait_for(Task, where=lambda task: task.round == 2)
    assert slow.hand_in(tasks[slow], encode(step(norm, 1.0)), examples=10).accepted
    fast.take(second)
    assert fast.hand_in(second, encode(step(norm, 1.0)), examples=10).accepted
    for device in (fast, other, slow):
        device.end()
    weights = server.result().bundle.weights
    expected = 1 + Fraction(10 * 256 + 10 * 181, 256 * 20)
    for name, before in norm.weights.items():
        if norm.manifest.rules[name] == "mean":
            np.testing.assert_allclose(before - weights[name], float(expected), rtol=1e-5, err_msg=name)


def test_a_device_that_began_before_the_last_model_still_gets_the_one_it_was_told(fleet, norm):
    _, server = fleet.serve(norm, rounds=2, min_devices=3, **BUFFERED)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    for device in (fast, other):
        device.take(tasks[device])
        device.hand_in(tasks[device], encode(step(norm, 1.0)))
    fast.wait_for(Task, where=lambda task: task.round == 2)
    late = slow.download(tasks[slow].model, norm.manifest.specs)
    for name, tensor in norm.weights.items():
        np.testing.assert_array_equal(late[name], tensor)
    # Coming back, it is told of the same work.
    slow.leave()
    slow.join()
    again = slow.task()
    assert (again.round, again.model.hash) == (1, tasks[slow].model.hash)
    server_stops(fleet, server)


def server_stops(fleet, thread):
    fleet._ends[-1][0]()
    thread.result()


def test_an_update_that_is_too_late_is_refused(fleet, norm):
    _, server = fleet.serve(norm, rounds=3, min_devices=3, max_staleness=0, **BUFFERED)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    for device in (fast, other):
        device.take(tasks[device])
        device.hand_in(tasks[device], encode(step(norm, 0.1)))
    fast.wait_for(Task, where=lambda task: task.round == 2)
    slow.offer(tasks[slow], encode(step(norm, 0.1)))
    receipt = slow.wait_for(Receipt)
    assert (receipt.accepted, "round 2 is open" in receipt.reason) == (False, True)
    server_stops(fleet, server)


def test_a_device_that_takes_too_long_loses_its_place(fleet, norm):
    options = {"mode": "buffered", "participants": 1, "buffer": 1, "deadline": 2.0}
    _, server = fleet.serve(norm, rounds=1, min_devices=2, **options)
    first, second = devices(fleet, "a", "b")
    until(lambda: fleet.heard(Task))
    asked = fleet.heard(Task)[0][0]
    slow, quick = (first, second) if asked == "a" else (second, first)
    slow.take(slow.task())
    task = quick.task()
    assert "turn" in slow.wait_for(Cancel).reason
    quick.take(task)
    assert quick.hand_in(task, encode(step(norm, 0.1))).accepted
    quick.end()
    slow.leave()
    server.result()


def test_fewer_devices_than_the_buffer_holds_make_models_all_the_same(fleet, norm):
    lines = []
    options = {"mode": "buffered", "participants": 2, "buffer": 5}
    _, server = fleet.serve(norm, rounds=2, min_devices=2, on_round=lines.append, **options)
    for number in range(2):
        fleet.device(f"d{number}", quadrants(12, seed=number))
    server.result()
    assert [line.participants for line in lines] == [2, 2]


def test_devices_that_have_all_declined_are_asked_again_after_a_pause(fleet, norm, monkeypatch):
    monkeypatch.setattr(coordinator, "PAUSE", 0.3)
    _, server = fleet.serve(norm, rounds=1, min_devices=2, **BUFFERED)
    busy = devices(fleet, "one", "two")
    for device in busy:
        device.send(Declined(**key_of(device.task()), reason="its battery is low"))
    for device in busy:
        again = device.task()
        device.take(again)
        assert device.hand_in(again, encode(step(norm, 0.5))).accepted
        device.leave()
    assert server.result().rounds[0].participants == 2


def test_a_server_that_starts_anew_keeps_what_is_in_the_buffer(fleet, norm):
    settings = {"rounds": 2, "min_devices": 3, **BUFFERED}
    server, thread = fleet.serve(norm, **settings)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    for device, task in tasks.items():
        device.take(task)
    assert fast.hand_in(tasks[fast], encode(step(norm, 1.0)), examples=10).accepted
    server.stop()
    thread.result()
    _, again = fleet.serve(norm, **settings)
    for device in (fast, other, slow):
        device.join()
    # What was finished while the server was away is taken under its own key.
    assert slow.hand_in(tasks[slow], encode(step(norm, 3.0)), examples=10).accepted
    assert other.hand_in(tasks[other], encode(step(norm, 1.0)), examples=10).accepted
    third = fast.wait_for(Task, where=lambda task: task.round == 2)
    fast.take(third)
    assert fast.hand_in(third, encode(step(norm, 1.0)), examples=10).accepted
    for device in (fast, other, slow):
        device.end()
    weights = again.result().bundle.weights
    moved = norm.weights["head.weight"] - weights["head.weight"]
    np.testing.assert_allclose(moved, 2.0 + (1 + 181 / 256) / 2, rtol=1e-5)
    store, run = opened(fleet)
    assert [r.same for r in replay(store, run)] == [True, True]


def test_a_device_that_stays_away_over_a_restart_of_the_server_holds_nobody_up(fleet, norm):
    settings = {"rounds": 2, "min_devices": 3, **BUFFERED}
    server, thread = fleet.serve(norm, **settings)
    fast, other, away = devices(fleet, "fast", "other", "away")
    tasks = {device: device.task() for device in (fast, other, away)}
    for device, task in tasks.items():
        device.take(task)
    server.stop()
    thread.result()
    _, again = fleet.serve(norm, **settings)
    for device in (fast, other):
        device.join()
        assert device.hand_in(tasks[device], encode(step(norm, 1.0))).accepted
    fast.wait_for(Task, where=lambda task: task.round == 2)
    # It comes back after all, and goes on with what it took.
    away.join()
    told = away.wait_for(Task)
    assert told.round == 1
    before = away.download(told.model, norm.manifest.specs)
    np.testing.assert_array_equal(before["head.weight"], norm.weights["head.weight"])
    server_stops(fleet, again)


def flushed(fleet, bundle, pair, number, *, tasks=None):
    """Two devices make the model of round ``number``; their next tasks."""
    for device in pair:
        task = tasks[device] if tasks else device.wait_for(Task, where=lambda task: task.round == number)
        device.take(task)
        assert device.hand_in(task, encode(step(bundle, 1.0))).accepted
    return {device: device.wait_for(Task, where=lambda task: task.round == number + 1) for device in pair}


def test_a_late_update_is_of_no_more_examples_than_were_declared(fleet, norm):
    _, server = fleet.serve(norm, rounds=4, min_devices=3, **BUFFERED)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    slow.take(tasks[slow], examples=10)
    tasks |= flushed(fleet, norm, (fast, other), 1, tasks=tasks)
    flushed(fleet, norm, (fast, other), 2, tasks=tasks)
    assert "10 were declared" in slow.hand_in(tasks[slow], encode(step(norm, 1.0)), examples=11).reason
    server_stops(fleet, server)


def restarted(fleet, server, bundle, *, rounds):
    """Another server in the place of ``server``, which has a buffer of round 2 that nothing is in."""
    server[0].stop()
    server[1].result()
    return fleet.serve(bundle, rounds=rounds, min_devices=3, **BUFFERED)[1]


def test_training_goes_on_over_a_restart_and_its_update_counts_by_the_model_it_began_with(fleet, norm):
    at_work, go_on = threading.Event(), threading.Event()

    def wait(_):
        at_work.set()
        go_on.wait(60)

    server = fleet.serve(norm, rounds=2, min_devices=3, **BUFFERED)
    fast, other = devices(fleet, "fast", "other")
    slow = fleet.device("slow", quadrants(10), on_progress=wait)
    tasks = {device: device.task() for device in (fast, other)}
    try:
        assert at_work.wait(60)
        tasks = flushed(fleet, norm, (fast, other), 1, tasks=tasks)
        again = restarted(fleet, server, norm, rounds=2)
        for device in (fast, other):
            device.join()
        until(lambda: len(fleet.heard(Taken, "slow")) == 2)
    finally:
        go_on.set()
    until(lambda: fleet.heard(Receipt, "slow"))
    assert fast.hand_in(tasks[fast], encode(step(norm, 1.0))).accepted
    for device in (fast, other):
        device.end()
    again.result()
    assert slow.result() == 1
    # It was not begun anew.
    assert [(m.round, m.examples) for _, m in fleet.heard(Taken, "slow")] == [(1, 10), (1, None)]
    store, run = opened(fleet)
    assert [(r.device, r.round) for r in store.results(store.rounds(run.id)[1])] == [("fast", 2), ("slow", 1)]
    assert [r.same for r in replay(store, run)] == [True, True]


def test_who_has_lost_the_model_that_ended_with_a_server_begins_with_the_newest(fleet, norm):
    server = fleet.serve(norm, rounds=3, min_devices=3, **BUFFERED)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    slow.take(tasks[slow])
    flushed(fleet, norm, (fast, other), 1, tasks=tasks)
    again = restarted(fleet, server, norm, rounds=3)
    slow.join()
    told = slow.task()
    assert (told.round, told.model.hash) == (1, tasks[slow].model.hash)
    slow.send(Grant(blob=told.model.hash, start=0, stop=1))
    newest = slow.wait_for(Task, where=lambda task: task.round == 2)
    moved = slow.download(newest.model, norm.manifest.specs)
    np.testing.assert_allclose(norm.weights["head.weight"] - moved["head.weight"], 1.0, rtol=1e-5)
    server_stops(fleet, again)


def test_a_server_that_ended_before_the_next_buffer_was_open_knows_what_has_counted(fleet, norm):
    server = fleet.serve(norm, rounds=3, min_devices=3, **BUFFERED)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    flushed(fleet, norm, (fast, other), 1, tasks=tasks)
    server[0].stop()
    server[1].result()
    with closing(sqlite3.connect(fleet.folder / "server" / "edge.sqlite")) as database, database:
        database.execute("DELETE FROM rounds WHERE round = 2")
    again = fleet.serve(norm, rounds=3, min_devices=3, **BUFFERED)[1]
    for device in (fast, other, slow):
        device.join()
    fast.wait_for(Task, where=lambda task: task.round == 2)
    # Its receipt was lost.
    assert fast.hand_in(tasks[fast], encode(step(norm, 1.0))).accepted
    store, run = opened(fleet)
    assert store.results(store.rounds(run.id)[1]) == []
    server_stops(fleet, again)


def test_who_comes_back_after_too_many_models_begins_with_the_newest(fleet, norm):
    _, server = fleet.serve(norm, rounds=3, min_devices=3, max_staleness=0, **BUFFERED)
    fast, other, slow = devices(fleet, "fast", "other", "slow")
    tasks = {device: device.task() for device in (fast, other, slow)}
    slow.take(tasks[slow])
    slow.leave()
    flushed(fleet, norm, (fast, other), 1, tasks=tasks)
    slow.join()
    assert slow.task().round == 2
    server_stops(fleet, server)


def test_an_update_that_comes_twice_counts_once(fleet, norm):
    _, server = fleet.serve(norm, rounds=1, min_devices=2, mode="buffered", participants=2, buffer=2)
    one, two = devices(fleet, "one", "two")
    tasks = {device: device.task() for device in (one, two)}
    data = encode(step(norm, 1.0))
    for _ in range(3):
        assert one.hand_in(tasks[one], data).accepted
    assert len([o for _, o in fleet.heard(Offer, "one")]) == 3
    assert two.hand_in(tasks[two], data).accepted
    for device in (one, two):
        device.end()
    assert server.result().rounds[0].participants == 2


@pytest.mark.parametrize("staleness", [0, 1, 2, 7, 100, 1000])
def test_the_share_is_the_root_of_the_staleness_in_whole_parts(staleness):
    assert share_of(staleness) == max(math.floor(256 / math.sqrt(1 + staleness)), 1)


@pytest.mark.parametrize(
    "settings",
    [{"chain": 2}, {"over_selection": 1.5}, {"evaluation": "devices"}, {"aggregation": "median"}],
)
def test_what_waits_for_a_round_does_not_go_with_it(settings):
    with pytest.raises(RunError, match="buffered mode does not go with"):
        RunConfig(fleet="f", rounds=1, mode="buffered", **settings).check()
