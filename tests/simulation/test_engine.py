"""A run in one process gives what the same run gives over the wire."""

import numpy as np
import pytest
from fleets import Fleet
from quadrants import quadrants

from edge_sdk.errors import DataError, RunError
from edge_server import RunConfig
from edge_simulation.engine import simulate
from edge_simulation.simulated_round import DivergedError

NAMES = [f"d{number}" for number in range(4)]


def shares():
    """Four devices of different sizes, one class each."""
    data = quadrants(200)
    return {name: data.take(np.flatnonzero(data.labels == i)[: 20 + 5 * i]) for i, name in enumerate(NAMES)}


def config(**settings):
    return RunConfig(**{"fleet": "f", "rounds": 3, "participants": 2, "lr": 0.1, "batch_size": 8, **settings})


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm"])
def test_the_model_has_the_bits_of_a_run_over_the_wire(norm, tmp_path, strategy):
    with Fleet(tmp_path) as fleet:
        _, server = fleet.serve(norm, rounds=3, participants=2, min_devices=4, strategy=strategy)
        for name, data in shares().items():
            fleet.device(name, data)
        outcome = server.result()
    simulated = simulate(norm, config(strategy=strategy), shares())
    assert same(simulated.weights, outcome.bundle.weights)


def test_the_bytes_are_those_of_a_run_over_the_wire(norm, tmp_path):
    with Fleet(tmp_path) as fleet:
        _, server = fleet.serve(norm, rounds=2, participants=3, min_devices=4)
        for name, data in shares().items():
            fleet.device(name, data)
        outcome = server.result()
    simulated = simulate(norm, config(rounds=2, participants=3), shares())
    counted = [
        (line.bytes_up, line.bytes_down, line.examples, line.participants) for line in simulated.rounds
    ]
    assert counted == [(r.bytes_up, r.bytes_down, r.examples, r.participants) for r in outcome.rounds]


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(norm, tmp_path):
    def stop(line):
        if line.round == 3:
            raise KeyboardInterrupt

    settings = {"rounds": 5, "strategy": "fedavgm"}
    whole = simulate(norm, config(**settings), shares())
    kept = {"checkpoint": tmp_path / "run", "save_every": 2}
    with pytest.raises(KeyboardInterrupt):
        simulate(norm, config(**settings), shares(), on_round=stop, **kept)
    seen = []
    rest = simulate(norm, config(**settings), shares(), on_round=lambda line: seen.append(line.round), **kept)
    assert seen == [3, 4, 5]
    assert same(rest.weights, whole.weights)
    assert rest.steps == whole.steps


def test_a_checkpoint_of_another_run_is_refused(norm, tmp_path):
    simulate(norm, config(rounds=1), shares(), checkpoint=tmp_path / "run")
    with pytest.raises(RunError, match="other settings"):
        simulate(norm, config(rounds=1, lr=0.2), shares(), checkpoint=tmp_path / "run")


def test_a_damaged_checkpoint_is_refused(norm, tmp_path):
    (tmp_path / "run").write_bytes(b"\x81\xa3run")
    with pytest.raises(RunError, match="not the checkpoint"):
        simulate(norm, config(rounds=1), shares(), checkpoint=tmp_path / "run")


def test_steps_are_counted_by_batches(norm):
    run = simulate(norm, config(rounds=2, participants=4, epochs=2), shares())
    # 20, 25, 30 and 35 examples in batches of 8.
    assert run.steps == 2 * 2 * (3 + 4 + 4 + 5)


def test_a_run_ends_when_its_steps_are_used_up(norm):
    run = simulate(norm, config(rounds=9, participants=4), shares(), max_steps=20)
    assert (len(run.rounds), run.steps) == (2, 2 * (3 + 4 + 4 + 5))


def test_a_chain_of_one_device_is_fedavg_to_within_rounding(norm):
    apart = simulate(norm, config(participants=4), shares())
    chained = simulate(norm, config(participants=4, chain=1), shares())
    assert same(apart.weights, chained.weights) or all(
        np.allclose(apart.weights[name], chained.weights[name], atol=1e-6) for name in apart.weights
    )


def test_a_chain_trains_one_device_after_the_other(norm):
    data = shares()
    both = simulate(norm, config(rounds=1, participants=2, chain=2), {n: data[n] for n in NAMES[:2]})
    first, second = (shares()[name] for name in NAMES[:2])
    # The greedy's first device of two pure ones is the first by id; here it trains alone, then the other.
    assert both.rounds[0].chains == 1
    assert both.rounds[0].examples == len(first) + len(second)
    assert both.rounds[0].divergence == pytest.approx(np.log(2), abs=0.05)


def test_all_diverged_is_an_error_that_says_what_to_do(norm):
    with pytest.raises(DivergedError, match="lower the learning rate"):
        simulate(norm, config(lr=1e6, rounds=3), shares())


def test_a_device_without_data_is_refused(norm):
    with pytest.raises(DataError, match="d1 has no example"):
        simulate(norm, config(), {"d1": quadrants(0)})


def test_augmented_examples_are_trained_on_and_counted(norm):
    data = quadrants(400)
    common, rare = np.flatnonzero(data.labels > 0), np.flatnonzero(data.labels == 0)[:20]
    devices = {"a": data.take(common), "b": data.take(rare)}
    run = simulate(norm, config(rounds=1, participants=2, augmentation=1.0), devices)
    mean = (len(common) + len(rare)) / 4
    below = [np.count_nonzero(data.labels[common] == label) for label in (1, 2, 3)]
    expected = mean + sum(max(count, mean) for count in below)
    assert run.rounds[0].examples == pytest.approx(expected, abs=4)


def test_devices_may_share_one_data_set_by_indices(norm):
    data = quadrants(200)
    indices = [np.flatnonzero(data.labels == i) for i in range(4)]
    by_index = simulate(norm, config(), {name: (data, indices[i]) for i, name in enumerate(NAMES)})
    by_copy = simulate(norm, config(), {name: data.take(indices[i]) for i, name in enumerate(NAMES)})
    assert same(by_index.weights, by_copy.weights)


def test_the_last_model_is_evaluated_and_every_other_as_often_as_asked(norm):
    run = simulate(norm, config(rounds=5), shares(), eval_data=quadrants(50, seed=9), evaluate_every=2)
    assert [line.accuracy is not None for line in run.rounds] == [False, True, False, True, True]
    assert run.evaluation.accuracy == run.rounds[-1].accuracy
