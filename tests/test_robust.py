import numpy as np
import pytest
from scipy.stats import trim_mean

from edge_sdk.errors import TensorError
from edge_server.aggregation import RobustMean, bound_norm

RULES = {"w": "mean", "running": "statistic", "seen": "counter"}


def update(seed):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.standard_normal((3, 4)).astype(np.float32),
        "running": rng.standard_normal(4).astype(np.float32),
        "seen": np.array(-int(rng.integers(1, 9))),
    }


def middle(updates, rule, trim=0.1):
    total = RobustMean(RULES, rule, trim=trim)
    for one in updates:
        total.add(one, 5)
    return total.mean().delta


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_the_median_is_numpys(count):
    updates = [update(seed) for seed in range(count)]
    found = middle(updates, "median")
    for name in ("w", "running"):
        stacked = np.stack([u[name] for u in updates]).astype(np.float64)
        np.testing.assert_allclose(found[name], np.median(stacked, axis=0), rtol=1e-12)


@pytest.mark.parametrize("trim", [0.0, 0.1, 0.25, 0.49])
def test_the_trimmed_mean_is_scipys(trim):
    updates = [update(seed) for seed in range(10)]
    stacked = np.stack([u["w"] for u in updates]).astype(np.float64)
    np.testing.assert_allclose(
        middle(updates, "trimmed_mean", trim)["w"], trim_mean(stacked, trim, axis=0), rtol=1e-12
    )


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_the_order_does_not_change_a_bit(rule):
    updates = [update(seed) for seed in range(7)]
    first, second = middle(updates, rule, 0.2), middle(updates[::-1], rule, 0.2)
    for name in RULES:
        np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize(("rule", "liars"), [("median", 4), ("trimmed_mean", 2)])
def test_liars_move_no_coordinate_beyond_the_honest_ones(rule, liars):
    honest = [update(seed) for seed in range(9 - liars)]
    lie = {name: np.full_like(tensor, 1 << 20) for name, tensor in update(0).items()}
    found = middle([*honest, *[lie] * liars], rule, 0.25)
    for name in ("w", "running"):
        assert (found[name] <= np.max([u[name] for u in honest], axis=0)).all()


def test_a_counter_advances_by_the_lower_median():
    updates = [{**update(0), "seen": np.array(-advance)} for advance in (1, 3, 4, 1 << 40)]
    assert middle(updates, "median")["seen"] == -3


def test_the_mean_of_nothing_and_a_trim_of_half_are_refused():
    with pytest.raises(ValueError, match="not defined"):
        RobustMean(RULES, "median").mean()
    with pytest.raises(ValueError, match=r"trim 0\.5"):
        RobustMean(RULES, "trimmed_mean", trim=0.5)


def norm(tensors):
    return float(np.linalg.norm(tensors["w"].astype(np.float64)))


def test_a_long_update_is_refused_by_its_norm():
    with pytest.raises(TensorError, match=r"norm .* is over the run's bound of 0\.5"):
        bound_norm(update(0), RULES, largest=0.5, over="refuse")


def test_a_long_update_is_clipped_to_the_bound_and_keeps_its_direction():
    clipped = bound_norm(update(0), RULES, largest=0.5, over="clip")
    assert norm(clipped) == pytest.approx(0.5, rel=1e-6)
    np.testing.assert_allclose(clipped["w"] / 0.5, update(0)["w"] / norm(update(0)), rtol=1e-5)


def test_statistics_and_counters_are_neither_counted_nor_clipped():
    wild = {**update(0), "running": np.full(4, 1e6, np.float32)}
    clipped = bound_norm(wild, RULES, largest=0.5, over="clip")
    for name in ("running", "seen"):
        np.testing.assert_array_equal(clipped[name], wild[name])


def test_a_short_update_and_no_bound_change_nothing():
    for largest in (0.0, 100.0):
        np.testing.assert_array_equal(
            bound_norm(update(0), RULES, largest=largest, over="refuse")["w"], update(0)["w"]
        )
