"""Noise on the sum of clipped updates, and what it leaves to be told of a device."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import optimize, stats

from edge_sdk.errors import RunError
from edge_sdk.noise import deviation, discrete_laplace, gaussian, noised
from edge_sdk.tensors import TensorSpec
from edge_server.aggregation import Noise, NoisySum, WeightedSum, bound_norm, plan_precision
from edge_server.config import make_config
from edge_server.privacy import Spent, check_noise, epsilon, simulated_seed

SEED = bytes(range(32))
SPECS = [TensorSpec("w", (300, 20)), TensorSpec("b", (20,))]
RULES = {"w": "mean", "b": "mean"}
VALUES = 6020
NOISY = {"fleet": "f", "rounds": 3, "noise_multiplier": 1.0, "max_norm": 0.5, "over_norm": "clip"}


def a_sum(*, multiplier=1.0, largest=0.5, wanted=4, seed=SEED, specs=SPECS, rules=RULES):
    precision = plan_precision({"mean": 6}, largest_total=wanted << 17, noise=multiplier * largest)
    noise = Noise(multiplier, largest, seed)
    return NoisySum(specs, rules, precision, noise=noise, wanted=wanted), precision


def an_update(rng, norm, largest=0.5):
    """Clipped, its length before that ``norm``."""
    update = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in SPECS}
    length = math.sqrt(sum(float((t.astype(np.float64) ** 2).sum()) for t in update.values()))
    update = {name: (tensor * np.float32(norm / length)) for name, tensor in update.items()}
    return bound_norm(update, RULES, largest=largest, over="clip")


def flat(delta):
    return np.concatenate([delta[spec.name].ravel() for spec in SPECS])


@pytest.mark.parametrize("norm", [0.1, 0.5, 0.5000001, 3.0, 1e6])
def test_one_device_moves_the_sum_by_no_more_than_the_noise_is_made_for(norm):
    rng = np.random.default_rng(1)
    for _ in range(5):
        others = [an_update(rng, 2.0) for _ in range(3)]
        without, precision = a_sum()
        with_it, _ = a_sum()
        for update in others:
            without.add(update, 7)
            with_it.add(update, 7)
        with_it.add(an_update(rng, norm), 100_000)
        step = 2.0 ** precision.exponents["mean"]
        moved = np.linalg.norm((flat(with_it.mean().delta) - flat(without.mean().delta)) * 4 * step)
        assert moved <= deviation(1.0, 0.5 * step, VALUES) <= 1.001 * 0.5 * step
        assert moved == pytest.approx(min(norm, 0.5) * step, rel=1e-3)


def test_every_update_counts_once_and_the_divisor_is_the_number_that_was_wanted():
    rng = np.random.default_rng(2)
    noisy, _ = a_sum(multiplier=1e-6, wanted=4)
    updates = [an_update(rng, 0.3) for _ in range(3)]
    for examples, update in zip((1, 50, 9), updates, strict=True):
        noisy.add(update, examples)
    expected = sum(flat(update).astype(np.float64) for update in updates) / 4
    np.testing.assert_allclose(flat(noisy.mean().delta), expected, atol=1e-5)
    assert noisy.examples == 60


def test_the_noise_of_the_sum_is_gaussian_with_the_deviation_that_was_asked_for():
    multiplier, largest, wanted = 0.7, 0.5, 4
    drawn = []
    for number in range(30):
        noisy, _ = a_sum(multiplier=multiplier, largest=largest, seed=bytes([number]) * 32, wanted=wanted)
        noisy.add({spec.name: np.zeros(spec.shape, np.float32) for spec in SPECS}, 1)
        drawn.append(flat(noisy.mean().delta) * wanted)
    drawn = np.concatenate(drawn)
    assert drawn.std() == pytest.approx(multiplier * largest, rel=0.01)
    assert drawn.mean() == pytest.approx(0, abs=5 * multiplier * largest / math.sqrt(len(drawn)))
    assert stats.kstest(drawn / (multiplier * largest), "norm").pvalue > 0.001


def test_noise_comes_in_whole_steps_of_the_sum():
    noisy, precision = a_sum()
    noisy.add(an_update(np.random.default_rng(3), 0.4), 1)
    steps = flat(noisy.mean().delta) * 4 * 2.0 ** precision.exponents["mean"]
    np.testing.assert_array_equal(steps, np.rint(steps))


def test_the_order_of_arrival_leaves_no_trace():
    rng = np.random.default_rng(4)
    updates = [an_update(rng, 1.0) for _ in range(4)]
    (forward, _), (backward, _) = a_sum(), a_sum()
    for update in updates:
        forward.add(update, 1)
    for update in reversed(updates):
        backward.add(update, 1)
    np.testing.assert_array_equal(flat(forward.mean().delta), flat(backward.mean().delta))


def test_noise_is_the_same_for_the_same_seed_and_another_for_another_seed_or_tensor():
    first = gaussian(SEED, "w", (40_000,))
    np.testing.assert_array_equal(first, gaussian(SEED, "w", (200, 200)).ravel())
    for other in (gaussian(SEED, "v", (40_000,)), gaussian(SEED[::-1], "w", (40_000,))):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.03


def test_values_next_to_one_another_are_independent():
    drawn = gaussian(SEED, "w", (100_000,))
    half = len(drawn) // 2
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:half], drawn[half:])[0, 1]) < 0.03


def test_a_tensor_that_noise_does_not_hide_is_no_part_of_a_noisy_sum():
    with pytest.raises(ValueError, match="nothing hides the statistic tensor 'm'"):
        a_sum(specs=[*SPECS, TensorSpec("m", (2,))], rules={**RULES, "m": "statistic"})


def test_a_noisy_round_takes_no_more_updates_than_its_noise_is_divided_by():
    noisy, _ = a_sum(wanted=1)
    noisy.add(an_update(np.random.default_rng(5), 1.0), 1)
    with pytest.raises(ValueError, match="has the 1 updates"):
        noisy.add(an_update(np.random.default_rng(6), 1.0), 1)


def test_without_noise_the_sum_is_as_fine_as_ever():
    bounds, total = {"mean": 6, "statistic": 16}, 10 << 17
    plain, noisy = (plan_precision(bounds, largest_total=total, noise=noise) for noise in (0.0, 1.0))
    assert plain.exponents == {"mean": 34, "statistic": 24}
    assert noisy.exponents == {"mean": 22, "statistic": 24}
    manifest = SimpleNamespace(specs=SPECS, rules=RULES)
    assert isinstance(make_config({"fleet": "f", "rounds": 1}).make_sum(manifest, plain), WeightedSum)


def test_noise_that_leaves_no_digits_is_refused():
    with pytest.raises(RunError, match="lower noise_multiplier or max_norm"):
        make_config({**NOISY, "max_norm": 1e9})


ALONE = [
    ({"max_norm": 0.0}, "hides only what is clipped"),
    ({"over_norm": "refuse"}, "hides only what is clipped"),
    ({"mode": "buffered"}, "the buffered mode"),
    ({"chain": 2}, "chain"),
    ({"aggregation": "median"}, "a robust aggregation"),
    ({"codec": "int8"}, "the codec int8"),
    ({"selection": "grouped"}, "grouped selection"),
    ({"augmentation": 0.67}, "augmentation"),
    ({"calibration": "ccvr"}, "calibration"),
]


@pytest.mark.parametrize(("settings", "complaint"), ALONE, ids=[c for _, c in ALONE])
def test_what_noise_does_not_go_with_is_refused_by_a_sentence(settings, complaint):
    make_config(NOISY)
    with pytest.raises(RunError, match=complaint):
        make_config({**NOISY, **settings})


def test_a_model_with_running_statistics_is_refused(norm):
    with pytest.raises(RunError, match="noise does not cover 'norm"):
        check_noise(norm.manifest)


def test_a_missing_accountant_is_named(cnn, monkeypatch):
    check_noise(cnn.manifest)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(RunError, match=r"edge-sdk-fl\[privacy\]"):
        check_noise(cnn.manifest)


def of_one_gaussian(sigma, delta):
    """ε of the Gaussian mechanism, theorem 8 of arXiv 1805.06530."""

    def over(eps):
        far = stats.norm.logcdf(-0.5 / sigma - eps * sigma)
        return stats.norm.cdf(0.5 / sigma - eps * sigma) - math.exp(eps + far) - delta

    return optimize.brentq(over, 0, 500)


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("rounds", [1, 4, 9])
def test_so_many_rounds_are_one_with_the_noise_over_the_root_of_their_number(multiplier, rounds):
    expected = of_one_gaussian(multiplier / math.sqrt(rounds), 1e-5)
    assert epsilon(multiplier, rounds, delta=1e-5) == pytest.approx(expected, rel=1e-6)


def test_composing_round_by_round_comes_to_the_same():
    from dp_accounting import GaussianDpEvent, LaplaceDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant().compose(LaplaceDpEvent(1e6))  # else equal events are joined in closed form
    for multiplier in (5.0, 5.001, 4.999):
        accountant.compose(GaussianDpEvent(multiplier))
    assert epsilon(5.0, 3, delta=1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_the_device_with_the_most_rounds_is_what_epsilon_is_stated_for():
    spent = Spent(2.0, 1e-6)
    assert spent.epsilon == 0
    for devices in (["a", "b"], ["a", "c"], ["b", "a"]):
        spent.add(devices)
    assert spent.epsilon == pytest.approx(of_one_gaussian(2.0 / math.sqrt(3), 1e-6), rel=1e-6)


def test_without_noise_no_epsilon_is_stated():
    spent = Spent(0.0, 1e-5)
    spent.add(["a"])
    assert spent.epsilon is None


def test_a_simulations_noise_is_the_runs_own():
    seeds = {simulated_seed(seed, number) for seed in range(3) for number in range(3)}
    assert len(seeds) == 9
    assert {len(seed) for seed in seeds} == {32}


def test_noise_on_counts_is_two_sided_geometric():
    bits = np.random.default_rng(7)
    drawn = [discrete_laplace(0.5, randbits=lambda n: int(bits.integers(1 << n))) for _ in range(40_000)]
    values, counts = np.unique(np.clip(drawn, -12, 12), return_counts=True)
    exact = stats.dlaplace(0.5)
    shares = np.array([exact.pmf(k) for k in values])
    shares[0], shares[-1] = exact.cdf(-12), exact.sf(11)
    assert stats.chisquare(counts, shares * len(drawn)).pvalue > 0.001


def test_noise_on_a_sum_lies_on_a_grid_that_says_nothing_of_the_sum():
    values = np.random.default_rng(8).normal(0, 30, 2000)
    found = noised(values, 3.0, 0.7, seed=SEED, name="sum")
    step = 2.0 ** (math.floor(math.log2(2.1)) - 22)
    np.testing.assert_array_equal(found / step, np.rint(found / step))
    assert (found - values).std() == pytest.approx(2.1, rel=0.05)
