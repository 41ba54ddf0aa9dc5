"""FedAdam, against PyTorch's Adam without its bias correction and against the paper in Python's floats."""

import math

import numpy as np
import pytest
import torch

from edge_server.aggregation import MeanUpdate, fedadam

SETTINGS = [(0.9, 0.99, 1e-3, 0.01), (0.0, 0.5, 1.0, 3.0), (0.5, 0.0, 1e-9, 0.1), (0.99, 0.999, 1e-2, 1.0)]


def deltas(rounds=60, size=40):
    """Updates of all scales, with some that are nothing."""
    rng = np.random.default_rng(3)
    made = rng.standard_normal((rounds, size)) * 10.0 ** rng.integers(-6, 2, (rounds, size))
    return made * (rng.random((rounds, size)) > 0.1)


def run(updates, beta1, beta2, tau, rate):
    strategy = fedadam(learning_rate=rate, beta1=beta1, beta2=beta2, tau=tau)
    state = strategy.init({"w": np.ones(updates.shape[1])}, {"w": "mean"})
    for delta in updates:
        state = strategy.apply(state, MeanUpdate({"w": delta}, {"w": "mean"}))
    return state.weights["w"]


@pytest.mark.parametrize(("beta1", "beta2", "tau", "rate"), SETTINGS)
def test_it_follows_algorithm_2_of_the_paper(beta1, beta2, tau, rate):
    updates = deltas()
    expected = []
    for column in updates.T.tolist():
        x, m, v = 1.0, 0.0, tau**2
        for received_minus_trained in column:
            delta = -received_minus_trained
            m = beta1 * m + (1 - beta1) * delta
            v = beta2 * v + (1 - beta2) * delta**2
            x = x + rate * m / (math.sqrt(v) + tau)
        expected.append(x)
    np.testing.assert_allclose(run(updates, beta1, beta2, tau, rate), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("beta1", "beta2", "tau", "rate"), SETTINGS)
def test_it_follows_torch_with_the_bias_correction_undone(beta1, beta2, tau, rate):
    updates = deltas()
    parameter = torch.ones(updates.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([parameter], betas=(beta1, beta2))
    optimiser.state[parameter] = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.full_like(parameter, tau**2),
    }
    for number, delta in enumerate(updates, 1):
        # torch takes lr/(1 − β1^t) · m / (√v/s + eps) with s = √(1 − β2^t).
        s = math.sqrt(1 - beta2**number)
        optimiser.param_groups[0].update(lr=rate * (1 - beta1**number) / s, eps=tau / s)
        parameter.grad = torch.tensor(delta)
        optimiser.step()
    np.testing.assert_allclose(
        run(updates, beta1, beta2, tau, rate), parameter.detach().numpy(), rtol=1e-9, atol=1e-9
    )


def test_a_lasting_update_moves_every_weight_by_the_server_rate_whatever_its_size():
    lasting = np.tile([1.0, -0.05, 30.0], (2000, 1))
    moved = run(lasting[:-1], 0.9, 0.99, 1e-6, 0.01) - run(lasting, 0.9, 0.99, 1e-6, 0.01)
    np.testing.assert_allclose(moved, [0.01, -0.01, 0.01], rtol=1e-4)


def test_no_update_moves_nothing():
    assert run(np.zeros((10, 3)), 0.9, 0.99, 1e-3, 0.01).tolist() == [1.0, 1.0, 1.0]


def test_the_smallest_tau_and_the_largest_update_are_finite():
    updates = np.array([[0.0, 2.0**-62, 2.0**40], [2.0**40, 2.0**40, -(2.0**40)]])
    assert np.isfinite(run(updates, 0.9, 0.99, 5e-324, 100)).all()


def test_it_has_no_effective_learning_rate():
    assert fedadam(learning_rate=0.01).effective_learning_rate(0.1) is None


@pytest.mark.parametrize(
    ("argument", "value"),
    [(name, value) for name in ("beta1", "beta2") for value in (1.0, -0.1, math.nan)]
    + [("learning_rate", value) for value in (0.0, -1.0, 101.0, math.nan)]
    + [("tau", value) for value in (0.0, -1e-3, 1.5, math.nan)],
)
def test_an_argument_out_of_range_is_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument.replace("_", " ")):
        fedadam(**{"learning_rate": 0.01, argument: value})
