"""The mean and the strategies, against PyTorch's optimiser and Python's integers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.errors import RunError, TensorError
from edge_sdk.tensors import TensorSpec
from edge_server.aggregation import (
    MeanUpdate,
    WeightedSum,
    fedadam,
    fedavg,
    fedavgm,
    fedprox,
    plan_precision,
)

SPECS = [
    TensorSpec("w", (3,)),
    TensorSpec("v", (2, 2)),
    TensorSpec("stat", (2,)),
    TensorSpec("count", (), "int64"),
]
RULES = {"w": "mean", "v": "mean", "stat": "statistic", "count": "counter"}
BOUNDS = {"mean": 6, "statistic": 20, "counter": 40}


def random_update(rng, scale=1.0):
    update = {s.name: (scale * rng.standard_normal(s.shape)).astype(np.float32) for s in SPECS[:3]}
    return {**update, "count": np.array(-rng.integers(100))}


def random_weights(seed=0):
    rng = np.random.default_rng(seed)
    weights = {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in SPECS[:3]}
    return {**weights, "count": np.array(7)}


def mean_of(updates, counts, total=1 << 20):
    running = WeightedSum(SPECS, RULES, plan_precision(BOUNDS, largest_total=total))
    for update, count in zip(updates, counts, strict=True):
        running.add(update, count)
    return running.mean()


def bits(tensors):
    return {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in tensors.items()}


STRATEGIES = [
    fedavg(),
    fedavgm(momentum=0.9, learning_rate=0.5),
    fedavgm(momentum=0.9, nesterov=False),
    fedadam(learning_rate=0.1),
]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=["avg", "nesterov", "classical", "adam"])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("momentum", "rate"), [(0.9, 1.0), (0.97, 0.3), (0.5, 2.0)])
def test_momentum_follows_torch(momentum, rate, nesterov):
    rng = np.random.default_rng(1)
    strategy = fedavgm(momentum=momentum, learning_rate=rate, nesterov=nesterov)
    weights = {"w": rng.standard_normal(50)}
    state = strategy.init(weights, {"w": "mean"})
    parameter = torch.tensor(weights["w"], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([parameter], lr=rate, momentum=momentum, nesterov=nesterov)
    for _ in range(100):
        delta = rng.standard_normal(50)
        state = strategy.apply(state, MeanUpdate({"w": delta}, {"w": "mean"}))
        parameter.grad = torch.tensor(delta)
        optimiser.step()
    np.testing.assert_allclose(state.weights["w"], parameter.detach().numpy(), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    "still", [fedavgm(momentum=0), fedavgm(momentum=0, nesterov=False), fedprox()], ids=["n", "c", "prox"]
)
def test_without_momentum_the_model_is_that_of_fedavg_to_the_bit(still):
    rng = np.random.default_rng(2)
    plain = fedavg()
    ours, theirs = plain.init(random_weights(), RULES), still.init(random_weights(), RULES)
    for _ in range(20):
        mean = mean_of([random_update(rng) for _ in range(3)], [5, 1, 9])
        ours, theirs = plain.apply(ours, mean), still.apply(theirs, mean)
        assert bits(ours.weights) == bits(theirs.weights)


def test_fedavg_is_the_received_minus_the_mean_update():
    update = {"w": np.float32([1, 2, 3]), "v": np.zeros((2, 2), np.float32), "stat": np.float32([0.5, 0])}
    other = {"w": np.float32([3, 2, 1]), "v": np.ones((2, 2), np.float32), "stat": np.float32([0, 0.5])}
    weights = {name: np.zeros_like(array) for name, array in random_weights().items()}
    mean = mean_of([{**update, "count": np.array(0)}, {**other, "count": np.array(0)}], [1, 3])
    new = fedavg().apply(fedavg().init(weights, RULES), mean).weights
    assert new["w"].tolist() == [-2.5, -2.0, -1.5]
    assert new["v"].tolist() == [[-0.75, -0.75], [-0.75, -0.75]]
    assert new["stat"].tolist() == [-0.125, -0.375]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32), st.permutations(range(6)))
def test_the_mean_has_the_same_bits_whatever_the_order(seed, order):
    rng = np.random.default_rng(seed)
    updates = [random_update(rng, scale=10.0 ** rng.integers(-6, 2)) for _ in range(6)]
    counts = [int(count) for count in rng.integers(1, 10_000, size=6)]
    shuffled = mean_of([updates[i] for i in order], [counts[i] for i in order])
    assert bits(shuffled.delta) == bits(mean_of(updates, counts).delta)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-64, 64, width=32), st.integers(1, 1 << 17)), min_size=1, max_size=8))
def test_the_mean_is_a_sum_in_python_integers_divided_once(pairs):
    precision = plan_precision({"mean": 6}, largest_total=8 << 17)
    running = WeightedSum([TensorSpec("w", ())], {"w": "mean"}, precision)
    for value, count in pairs:
        running.add({"w": np.array(value, np.float32)}, count)
    scale = 1 << precision.exponents["mean"]
    total = sum(round(value * scale) * count for value, count in pairs)
    assert float(running.mean().delta["w"]) == float(total) / float(scale * sum(n for _, n in pairs))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("bound", "devices", "count"), [(6, 10, 1 << 17), (20, 1, 1), (3, 1000, 999_983)])
def test_nothing_wraps_at_the_limits_of_the_plan(sign, bound, devices, count):
    precision = plan_precision({"mean": bound}, largest_total=devices * count)
    running = WeightedSum([TensorSpec("w", (1,))], {"w": "mean"}, precision)
    extreme = {"w": np.float32([sign * 2.0**bound])}
    total = 0
    for _ in range(devices):
        running.add(extreme, count)
        total += sign * (1 << bound + precision.exponents["mean"]) * count
    assert 0 < abs(total) < 1 << 62
    assert running.mean().delta["w"].tolist() == [sign * 2.0**bound]


@pytest.mark.parametrize("total", [1, 1000, 10 << 17, 1 << 30])
def test_the_plan_is_as_fine_as_a_message_can_say(total):
    exponent = plan_precision({"mean": 0}, largest_total=total).exponents["mean"]
    assert total << exponent <= 1 << 61 < total << exponent + 2 or exponent == 62


def test_an_exponent_fits_the_message_that_announces_it():
    assert plan_precision({"mean": -20}, largest_total=1).exponents["mean"] <= 62


def test_a_plan_that_could_overflow_is_refused():
    with pytest.raises(RunError, match="lower the bound or max_examples"):
        plan_precision({"mean": 40}, largest_total=1 << 17)


@each_strategy
def test_running_variance_gets_no_momentum(strategy):
    weights = {**random_weights(), "stat": np.float32([1.0, 1.0])}
    state, reported = strategy.init(weights, RULES), np.float32([0.1, 0.1])
    zeros = {s.name: np.zeros(s.shape, s.dtype) for s in SPECS}
    for _ in range(50):
        update = {**zeros, "stat": state.weights["stat"] - reported}
        state = strategy.apply(state, mean_of([update, update], [3, 4]))
        assert (state.weights["stat"] > 0).all()
    np.testing.assert_allclose(state.weights["stat"], 0.1, rtol=1e-6)
    assert not {"stat", "count"} & {name for slot in state.slots.values() for name in slot}


@each_strategy
def test_a_counter_advances_by_the_largest_advance_and_stays_an_integer(strategy):
    zeros = {s.name: np.zeros(s.shape, s.dtype) for s in SPECS}
    state = strategy.init(random_weights(), RULES)
    mean = mean_of([{**zeros, "count": np.array(-advance)} for advance in (2, 11, 3)], [1, 1, 100])
    new = strategy.apply(state, mean).weights["count"]
    assert (new.dtype, new.tolist()) == (np.int64, 18)


def test_a_tensor_without_dimensions_stays_an_array():
    state = fedavg().init(random_weights(), RULES)
    weights = fedavg().apply(state, mean_of([random_update(np.random.default_rng(8))], [1])).weights
    assert {type(array) for array in weights.values()} == {np.ndarray}


def test_a_counter_is_exact_where_a_float_would_not_be():
    weights = {**random_weights(), "count": np.array((1 << 53) + 1)}
    zeros = {s.name: np.zeros(s.shape, s.dtype) for s in SPECS}
    state = fedavg().apply(fedavg().init(weights, RULES), mean_of([{**zeros, "count": np.array(-1)}], [1]))
    assert state.weights["count"].tolist() == (1 << 53) + 2


@given(st.permutations(range(len(SPECS))), st.permutations(range(len(SPECS))))
@settings(max_examples=20, deadline=None)
@each_strategy
def test_tensors_are_paired_by_name_and_never_by_position(strategy, first, second):
    def shuffled(tensors, order):
        names = list(tensors)
        return {names[i]: tensors[names[i]] for i in order}

    update = random_update(np.random.default_rng(4))
    straight = strategy.apply(strategy.init(random_weights(), RULES), mean_of([update], [2]))
    state = strategy.init(shuffled(random_weights(), first), shuffled(RULES, second))
    crooked = strategy.apply(state, mean_of([shuffled(update, second)], [2]))
    assert bits(crooked.weights) == bits(straight.weights)


@each_strategy
def test_a_state_survives_its_bytes(strategy):
    rng = np.random.default_rng(5)
    state = strategy.apply(strategy.init(random_weights(), RULES), mean_of([random_update(rng)], [1]))
    back = strategy.restore(state.to_bytes(), SPECS, RULES)
    assert bits(back.weights) == bits(state.weights)
    assert back.slots.keys() == state.slots.keys()
    assert all(bits(back.slots[slot]) == bits(state.slots[slot]) for slot in state.slots)


def test_the_state_of_another_model_is_refused():
    data = fedavg().init(random_weights(), RULES).to_bytes()
    with pytest.raises(TensorError, match=r"weights/extra.*missing"):
        fedavg().restore(data, [*SPECS, TensorSpec("extra", ())], {**RULES, "extra": "counter"})


@pytest.mark.parametrize(
    ("written", "read"),
    [(a, b) for a in (fedavg(), STRATEGIES[1], STRATEGIES[3]) for b in STRATEGIES if a.name != b.name],
    ids=lambda strategy: strategy.name,
)
def test_the_state_of_another_strategy_is_refused(written, read):
    data = written.init(random_weights(), RULES).to_bytes()
    with pytest.raises(TensorError, match=f"not a state of {read.name}"):
        read.restore(data, SPECS, RULES)


@each_strategy
def test_the_state_before_is_left_as_it_was(strategy):
    state = strategy.init(random_weights(), RULES)
    before = state.to_bytes()
    strategy.apply(state, mean_of([random_update(np.random.default_rng(6))], [1]))
    assert state.to_bytes() == before


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("momentum", "rate"), [(0.0, 1.0), (0.9, 0.5), (0.97, 1.0)])
def test_under_a_lasting_update_a_round_moves_the_model_by_the_effective_rate(momentum, rate, nesterov):
    strategy = fedavgm(momentum=momentum, learning_rate=rate, nesterov=nesterov)
    gradient, local = np.array([2.0, -3.0]), 0.01
    state = strategy.init({"w": np.zeros(2)}, {"w": "mean"})
    mean = MeanUpdate({"w": local * gradient}, {"w": "mean"})
    for _ in range(1000):
        before, state = state, strategy.apply(state, mean)
    moved = before.weights["w"] - state.weights["w"]
    np.testing.assert_allclose(moved, strategy.effective_learning_rate(local) * gradient, rtol=1e-9)


def test_an_update_without_examples_is_not_added():
    running = WeightedSum(SPECS, RULES, plan_precision(BOUNDS, largest_total=10))
    with pytest.raises(ValueError, match="no weight"):
        running.add(random_update(np.random.default_rng(7)), 0)


def test_the_mean_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no updates"):
        WeightedSum(SPECS, RULES, plan_precision(BOUNDS, largest_total=10)).mean()


@pytest.mark.parametrize("arguments", [{"momentum": 1.0}, {"momentum": -0.1}, {"momentum": float("nan")}])
def test_a_momentum_out_of_range_is_refused(arguments):
    with pytest.raises(ValueError, match="momentum"):
        fedavgm(**arguments)


@pytest.mark.parametrize("rate", [0.0, -1.0, 101.0, float("nan")])
def test_a_server_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match="learning rate"):
        fedavgm(momentum=0.9, learning_rate=rate)
