"""Runs with noise: the same bits after a restart, in a replay and in one process."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from fleets import Fleet
from quadrants import quadrants

from edge_sdk.errors import RunError
from edge_sdk.protocol.messages import Offer, Ref
from edge_sdk.tensors import encode
from edge_server.cohort import Cohort
from edge_server.config import make_config
from edge_server.privacy import Spent, epsilon
from edge_server.replay import replay
from edge_server.rounds import TrainingRound
from edge_server.rows import AcceptedResult
from edge_server.store import Store
from edge_simulation import simulate, simulated_round

NOISY = {"noise_multiplier": 0.4, "max_norm": 0.5, "over_norm": "clip"}
DATA = {f"d{number}": quadrants(20 + number, seed=number) for number in range(3)}


@pytest.fixture
def fleet(tmp_path):
    with Fleet(tmp_path) as made:
        yield made


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "run")
    opened.take("f")
    yield opened
    opened.close()


def begin(store, bundle, **settings):
    config = make_config({"fleet": "f", "rounds": 3, "participants": 2, **NOISY, **settings})
    state = config.make_strategy().init(bundle.weights, bundle.manifest.rules)
    return store.begin(config, bundle.data, encode(state.weights), state.to_bytes())


def opened(run, bundle, devices=("a", "b"), *, attempt=0):
    cohort = Cohort(wanted=2, asked=2, order=devices)
    return TrainingRound.open(run, bundle, cohort, attempt=attempt, now=0.0)


def test_a_run_with_noise_is_replayed_to_the_bit_and_simulated_to_the_bit(fleet, cnn, monkeypatch):
    settings = {"rounds": 3, "participants": 2, "min_devices": 3, "strategy": "fedavgm", **NOISY}
    lines = []
    _, server = fleet.serve(cnn, on_round=lines.append, **settings)
    for name, data in DATA.items():
        fleet.device(name, data)
    over_the_wire = server.result().bundle.weights
    store = Store(fleet.folder / "server", exclusive=False)
    run = store.runs()[-1]
    assert [r.same for r in replay(store, run)] == [True] * 3

    seeds = {row.round: row.noise_seed for row in store.rounds(run.id)}
    assert {len(seed) for seed in seeds.values()} == {32}
    assert len(set(seeds.values())) == 3
    monkeypatch.setattr(simulated_round, "simulated_seed", lambda _, number: seeds[number])
    simulated = simulate(cnn, fleet.config(**settings), DATA)
    for name, expected in simulated.weights.items():
        np.testing.assert_array_equal(over_the_wire[name], expected, err_msg=name)
    assert [line.epsilon for line in lines] == [line.epsilon for line in simulated.rounds]
    assert lines[0].epsilon == epsilon(0.4, 1, delta=1e-5)


def test_noise_moves_the_model_as_far_as_it_says(cnn):
    config = {"fleet": "f", "rounds": 1, "participants": 3, "evaluation": "none", "lr": 0.1, **NOISY}
    small = simulate(cnn, make_config({**config, "noise_multiplier": 1e-6}), DATA).weights
    noisy = simulate(cnn, make_config({**config, "noise_multiplier": 2.0}), DATA).weights
    moved = np.concatenate([(noisy[name] - small[name]).ravel() for name in small])
    assert moved.std() == pytest.approx(2.0 * 0.5 / 3, rel=0.03)


def test_a_restarted_server_draws_the_noise_that_it_would_have_drawn(store, cnn):
    run = begin(store, cnn)
    before = opened(run, cnn)
    store.open_round(before.row)
    row = store.rounds(run.id)[-1]
    assert row.noise_seed == before.row.noise_seed
    after = TrainingRound.restore(run, cnn, row, now=9.0)
    update = {name: np.full_like(weight, 1e-3) for name, weight in cnn.weights.items()}
    for training in (before, after):
        training.take(AcceptedResult("a", "0" * 64, 5, 1), update)
    first, second = before.mean().delta, after.mean().delta
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_an_attempt_that_is_repeated_has_noise_of_its_own(store, cnn):
    run = begin(store, cnn)
    seeds = {opened(run, cnn, attempt=attempt).row.noise_seed for attempt in range(3)}
    assert len(seeds) == 3


def test_a_run_without_noise_has_no_seed_of_it(store, cnn):
    run = begin(store, cnn, noise_multiplier=0.0)
    training = opened(run, cnn)
    store.open_round(training.row)
    assert store.rounds(run.id)[0].noise_seed is None


def test_what_was_spent_before_a_restart_is_counted_and_what_was_repeated_is_not(store, cnn):
    run = begin(store, cnn)
    for attempt, devices in enumerate((["a", "b"], ["a", "c"])):
        row = opened(run, cnn, devices, attempt=attempt).row
        store.open_round(row)
        for device in devices:
            accept(store, row, device)
        if attempt == 0:
            store.repeat(row)
    assert Spent.restore(store, run).epsilon == 0
    store.aggregate(row, run.config, model=b"m", state=b"s", old_state=run.state)
    assert Spent.restore(store, run).epsilon == epsilon(0.4, 1, delta=1e-5)


def test_the_seed_of_a_round_is_forgotten_with_its_updates(store, cnn):
    run = begin(store, cnn)
    for number, keep in ((1, True), (2, False)):
        row = replace(opened(run, cnn).row, round=number)
        store.open_round(row)
        config = msgspec.structs.replace(run.config, keep_updates=keep)
        store.aggregate(row, config, model=b"m", state=b"s", old_state=run.state)
    kept, forgotten = store.rounds(run.id)
    assert len(kept.noise_seed) == 32
    assert forgotten.noise_seed is None


def accept(store, row, device):
    key = {"run": row.run, "round": row.round, "attempt": row.attempt, "kind": "train"}
    blob = Ref(hash=device * 64, size=1, chunk=1024)
    store.accept(device, Offer(**key, blob=blob, examples=5), device.encode(), counted=row.round)


def test_a_server_refuses_a_model_whose_running_statistics_noise_does_not_cover(fleet, norm):
    with pytest.raises(RunError, match="noise does not cover"):
        fleet.serve(norm, **NOISY)


def test_a_simulation_refuses_it_too(norm):
    with pytest.raises(RunError, match="noise does not cover"):
        simulate(norm, make_config({"fleet": "f", "rounds": 1, **NOISY}), DATA)
