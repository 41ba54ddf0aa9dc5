"""Draws from the pooled Gaussians and the distances between them, against moments and brute force."""

import numpy as np
import pytest
from scipy import stats

from edge_sdk.statistics import packed
from edge_server.calibration import Pooled, sliced_wasserstein, virtual_features


def gaussians(means, covariances, counts=None):
    """A pool that has exactly these moments."""
    means, covariances = np.array(means, float), np.array(covariances, float)
    counts = np.full(len(means), 1000) if counts is None else np.array(counts)
    scatters = covariances * (counts - 1).reshape(-1, *[1] * (covariances.ndim - 1))
    if covariances.ndim == 3:
        scatters = np.array([packed(scatter) for scatter in scatters])
    return Pooled(counts, means, scatters)


COVARIANCE = np.array([[4.0, 1.9, 0.0], [1.9, 1.0, 0.3], [0.0, 0.3, 2.0]])
THREE = gaussians([[0, 0, 0], [9, 9, 9], [-5, 0, 5]], [COVARIANCE, np.eye(3), 2 * np.eye(3)])


def draw(pooled, per_class=1000, balance="equal", seed=0, **options):
    return virtual_features(pooled, per_class=per_class, balance=balance, seed=seed, **options)


def test_draws_have_the_moments_of_their_class():
    features, labels = draw(THREE, per_class=100_000)
    np.testing.assert_allclose(features[labels == 0].mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose(np.cov(features[labels == 0].T), COVARIANCE, atol=0.06)


def test_draws_are_normal():
    features, labels = draw(THREE, per_class=2000)
    projected = features[labels == 0] @ np.array([1.0, -2.0, 0.5])
    assert stats.normaltest(projected).pvalue > 0.01


def test_draws_of_diagonals_have_their_variances():
    pooled = gaussians([[1, 2], [3, 4]], [[4.0, 0.0], [1.0, 9.0]])
    features, labels = draw(pooled, per_class=100_000)
    np.testing.assert_allclose(features[labels == 1].var(axis=0), [1, 9], rtol=0.02)
    assert (features[labels == 0][:, 1] == 2).all()


def test_equal_gives_each_class_the_same_number():
    _, labels = draw(gaussians([[0], [1], [2]], [[1.0]] * 3, [900, 90, 10]), per_class=50)
    assert np.bincount(labels).tolist() == [50, 50, 50]


def test_frequency_follows_the_counts():
    _, labels = draw(
        gaussians([[0], [1], [2]], [[1.0]] * 3, [900, 90, 10]), per_class=100, balance="frequency"
    )
    assert np.bincount(labels).tolist() == [270, 27, 3]


def test_frequency_gives_a_rare_class_one():
    _, labels = draw(gaussians([[0], [1]], [[1.0]] * 2, [10**6, 2]), per_class=100, balance="frequency")
    assert np.bincount(labels).tolist() == [200, 1]


@pytest.mark.parametrize("balance", ["equal", "frequency"])
def test_none_asked_for_gives_none(balance):
    features, labels = draw(THREE, per_class=0, balance=balance)
    assert (features.shape, labels.shape) == ((0, 3), (0,))


def test_a_class_without_samples_is_not_drawn():
    _, labels = draw(gaussians([[0], [1], [2]], [[1.0]] * 3, [5, 0, 5]), per_class=3)
    assert labels.tolist() == [0, 0, 0, 2, 2, 2]


def test_draws_are_not_clipped():
    assert (draw(THREE)[0] < 0).any()


def test_a_singular_covariance_leaves_its_null_space_at_the_mean():
    direction = np.array([1.0, 2.0, 2.0]) / 3
    features, _ = draw(gaussians([[5, 5, 5]], [np.outer(direction, direction)]))
    off = features - 5 - np.outer((features - 5) @ direction, direction)
    np.testing.assert_allclose(off, 0, atol=1e-6)
    assert (features - 5).std() > 0.4


def test_an_eigenvalue_that_rounding_left_below_zero_is_none():
    covariance = np.ones((3, 3)) - 1e-13 * np.eye(3)
    assert np.linalg.eigvalsh(covariance)[0] < 0
    assert np.isfinite(draw(gaussians([[0, 0, 0]], [covariance]))[0]).all()


def test_the_same_seed_draws_the_same_bits():
    assert draw(THREE, seed=7)[0].tobytes() == draw(THREE, seed=7)[0].tobytes()
    assert draw(THREE, seed=7)[0].tobytes() != draw(THREE, seed=8)[0].tobytes()


def test_a_class_does_not_depend_on_the_others():
    alone = Pooled(THREE.count * [0, 1, 0], THREE.mean, THREE.scatter)
    features, labels = draw(THREE)
    assert (draw(alone)[0] == features[labels == 1]).all()


def test_rounding_of_a_covariance_moves_draws_by_rounding():
    noise = np.random.default_rng(0).standard_normal(THREE.scatter.shape)
    shaken = Pooled(THREE.count, THREE.mean, THREE.scatter * (1 + 1e-12 * noise))
    np.testing.assert_allclose(draw(shaken)[0], draw(THREE)[0], atol=1e-9)


def test_shrinkage_reaches_the_draws():
    pooled = gaussians([[0, 0], [0, 0]], [[0.0, 0.0], [1.0, 1.0]], [2, 1000])
    features, labels = draw(pooled, per_class=100_000, shrinkage=9.0)
    np.testing.assert_allclose(features[labels == 0].var(axis=0), 0.9, rtol=0.02)


def test_one_dimension_has_the_closed_form():
    pooled = gaussians([[1], [4]], [[4.0], [36.0]])
    assert sliced_wasserstein(pooled, projections=1) == pytest.approx(np.hypot(3, 4))


@pytest.mark.parametrize("covariances", [[COVARIANCE, np.eye(3)], [[4.0, 1.0, 2.0], [1.0, 1.0, 1.0]]])
def test_a_pair_is_as_far_apart_as_its_sorted_samples(covariances):
    means, rng = [[0, 0, 0], [1, -1, 2]], np.random.default_rng(0)
    full = [c if np.ndim(c) == 2 else np.diag(c) for c in covariances]
    x, y = (rng.multivariate_normal(m, c, 20_000) for m, c in zip(means, full, strict=True))
    directions = rng.standard_normal((400, 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    squares = [((np.sort(x @ a) - np.sort(y @ a)) ** 2).mean() for a in directions]
    found = sliced_wasserstein(gaussians(means, covariances), projections=20_000)
    assert found == pytest.approx(np.sqrt(np.mean(squares)), rel=0.04)


def test_of_equal_covariances_it_is_the_distance_of_the_means():
    pooled = gaussians([[0] * 8, [2] * 8], [np.eye(8)] * 2)
    assert sliced_wasserstein(pooled, projections=20_000) == pytest.approx(2, rel=0.02)


def test_it_is_the_mean_over_pairs():
    pooled = gaussians([[0], [3], [10]], [[1.0]] * 3)
    assert sliced_wasserstein(pooled) == pytest.approx((3 + 7 + 10) / 3)


def test_a_class_without_samples_is_in_no_pair():
    pooled = gaussians([[0], [99], [10]], [[1.0]] * 3, [5, 0, 5])
    assert sliced_wasserstein(pooled) == pytest.approx(10)


def test_one_class_is_no_pair():
    assert sliced_wasserstein(gaussians([[0], [1]], [[1.0]] * 2, [5, 0])) == 0


def test_the_distance_has_the_unit_of_the_features():
    scaled = Pooled(THREE.count, 10 * THREE.mean, 100 * THREE.scatter)
    assert sliced_wasserstein(scaled) == pytest.approx(10 * sliced_wasserstein(THREE))


def test_directions_follow_the_seed():
    assert sliced_wasserstein(THREE, seed=1) == sliced_wasserstein(THREE, seed=1)
    assert sliced_wasserstein(THREE, seed=1) != sliced_wasserstein(THREE, seed=2)
