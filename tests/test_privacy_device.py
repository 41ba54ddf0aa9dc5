"""Noise on what a device tells of its data."""

import secrets
from types import SimpleNamespace

import numpy as np
import pytest
from quadrants import quadrants
from scipy import stats

from edge_sdk.data import ArrayDataset
from edge_sdk.description import Sharing, describe
from edge_sdk.errors import DataError
from edge_sdk.manifest import Input
from edge_sdk.noisy_statistics import FeatureNoise, hidden_counts, hidden_moments
from edge_sdk.statistics import check_statistics, class_statistics

DATA = quadrants(200)
COUNTS = np.bincount(DATA.labels, minlength=4)
FEATURES = 9
MANIFEST = SimpleNamespace(
    classes=3, backbone=None, feature_size=FEATURES, input=Input((1, 3, 3), (0.0,), (1.0,))
)
PIXELS = SimpleNamespace(embed=lambda x: x.reshape(-1, FEATURES))


def told(paper, sharing, multiples=None):
    return describe(
        DATA,
        np.arange(len(DATA)),
        paper.manifest,
        ("histogram",),
        sharing,
        trained=lambda: pytest.fail("copies are counted by the plan"),
        multiples=multiples,
        open_describer=lambda: pytest.fail("no image need be looked at"),
    )["histogram"]


def noise(multiplier, norm=2.0):
    return FeatureNoise(multiplier, norm, secrets.token_bytes(32))


def some_data(count=300, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.normal(0.5, 0.3, (count, 3, 3)).astype(np.float32)
    return ArrayDataset(images, rng.integers(3, size=count))


def statistics(data, hidden, covariance="full", rank=0, withhold_below=0):
    return class_statistics(
        PIXELS,
        MANIFEST,
        data,
        np.arange(len(data)),
        covariance=covariance,
        rank=rank,
        withhold_below=withhold_below,
        noise=hidden,
    )


def test_the_noise_of_a_histogram_is_two_sided_geometric(paper):
    drawn = [
        told(paper, Sharing(histogram=True, histogram_epsilon=1.0, withhold_below=0)) for _ in range(500)
    ]
    values, counts = np.unique(np.clip(np.array(drawn) - COUNTS, -4, 4), return_counts=True)
    exact = stats.dlaplace(1.0)
    shares = np.array([exact.cdf(-4), *exact.pmf(np.arange(-3, 4)), exact.sf(3)])
    assert values.tolist() == list(range(-4, 5))
    # The operating system cannot be seeded: once in a million runs this fails by chance.
    assert stats.chisquare(counts, shares * counts.sum()).pvalue > 1e-6


def test_the_same_data_gives_the_same_answer_however_often_it_is_asked_for(paper):
    sharing = Sharing(histogram=True, histogram_epsilon=0.01)
    np.testing.assert_array_equal(told(paper, sharing), told(paper, sharing))
    others = [told(paper, Sharing(histogram=True, histogram_epsilon=0.01)).tolist() for _ in range(3)]
    assert told(paper, sharing).tolist() not in others


def test_a_noisy_count_is_never_below_nothing_and_is_withheld_below_the_bound(paper):
    for _ in range(20):
        counts = told(paper, Sharing(histogram=True, histogram_epsilon=0.01, withhold_below=40))
        assert ((counts == 0) | (counts >= 40)).all()


def test_copies_multiply_the_noisy_count_and_get_no_noise_of_their_own(paper):
    sharing = Sharing(histogram=True, histogram_epsilon=0.1)
    plain = told(paper, sharing)
    np.testing.assert_array_equal(told(paper, sharing, {1: 2.0, 3: 3.0}), plain * [1, 2, 1, 3])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"histogram_epsilon": -1.0}, "histogram_epsilon is -1"),
        ({"histogram_epsilon": np.nan}, "histogram_epsilon is nan"),
        ({"histogram_epsilon": 1e-9}, "share no histogram"),
        ({"statistics_noise": 1.0}, "give feature_norm"),
        ({"feature_norm": 1.0}, "give feature_norm with it, or none"),
    ],
)
def test_settings_that_hide_nothing_are_refused(settings, complaint):
    with pytest.raises(DataError, match=complaint):
        Sharing(**settings)


def test_there_is_no_noise_on_statistics_by_default_and_new_noise_for_each_answer():
    assert Sharing().feature_noise() is None
    sharing = Sharing(statistics_noise=2.0, feature_norm=3.0)
    first, second = sharing.feature_noise(), sharing.feature_noise()
    assert (first.multiplier, first.norm) == (2.0, 3.0)
    assert first.seed != second.seed


@pytest.mark.parametrize(("covariance", "rank"), [("full", 0), ("diagonal", 0), ("low_rank", 2)])
def test_with_hardly_any_noise_and_no_clipping_the_statistics_are_the_exact_ones(covariance, rank):
    data = some_data()
    exact = statistics(data, None, covariance, rank)
    hidden = statistics(data, noise(1e-9, norm=100.0), covariance, rank)
    np.testing.assert_array_equal(hidden["count"], exact["count"])
    for name in exact.keys() - {"count", "factor"}:
        np.testing.assert_allclose(hidden[name], exact[name], atol=1e-2, err_msg=name)


@pytest.mark.parametrize(("covariance", "rank"), [("full", 0), ("diagonal", 0), ("low_rank", 2)])
@pytest.mark.parametrize("multiplier", [0.1, 1.0, 100.0])
def test_statistics_with_noise_pass_the_servers_check(covariance, rank, multiplier):
    for count in (3, 40, 300):
        found = statistics(some_data(count), noise(multiplier), covariance, rank)
        check_statistics(found, max_examples=count)


def test_counts_with_noise_are_no_more_in_all_than_there_are_and_keep_to_the_bound():
    counts = np.array([3, 0, 40, 8])
    for _ in range(200):
        found = hidden_counts(counts, noise(3.0), withhold_below=5)
        assert found.sum() <= 51
        assert ((found == 0) | (found >= 5)).all()


class Recorded(FeatureNoise):
    """Notes the sums before their noise, in units of their sensitivity."""

    __slots__ = ("sums",)

    def hide(self, values, sensitivity, name):
        if not hasattr(self, "sums"):
            object.__setattr__(self, "sums", {})
        self.sums[name] = np.asarray(values) / sensitivity
        return values


@pytest.mark.parametrize("diagonal", [False, True])
def test_one_example_moves_the_sums_by_no_more_than_the_root_of_three(diagonal):
    rng = np.random.default_rng(3)
    for length in (0.1, 1.0, 2.0, 50.0):
        features = rng.normal(size=(20, FEATURES)).astype(np.float32) * np.float32(length)
        seen = []
        for kept in (features, features[1:]):
            recorded = Recorded(1.0, 2.0, b"")
            hidden_counts(np.array([len(kept)]), recorded, withhold_below=0)
            hidden_moments([kept], 20, recorded, name="0", feature_size=FEATURES, diagonal=diagonal)
            seen.append(np.concatenate([recorded.sums[name].ravel() for name in sorted(recorded.sums)]))
        assert np.linalg.norm(seen[0] - seen[1]) <= np.sqrt(3) * (1 + 1e-9)


@pytest.mark.parametrize("diagonal", [False, True])
def test_the_noise_of_mean_and_scatter_has_the_deviation_that_is_written_down(diagonal):
    count, norm, multiplier = 1000, 2.0, 0.5
    # Far from singular, so that the projection changes nothing.
    features = np.random.default_rng(4).choice([-0.5, 0.5], (count, FEATURES)).astype(np.float32)
    exact = np.cov(features.T, bias=True) * count
    means, scatters = [], []
    for _ in range(300):
        mean, scatter = hidden_moments(
            [features], count, noise(multiplier, norm), name="0", feature_size=FEATURES, diagonal=diagonal
        )
        means.append(mean - features.mean(axis=0))
        scatters.append(scatter - (np.diag(exact) if diagonal else exact))
    expected = np.sqrt(3) * multiplier
    assert np.std(means) * count == pytest.approx(expected * norm, rel=0.1)
    alone = np.array(scatters) if diagonal else np.diagonal(scatters, axis1=1, axis2=2)
    assert np.std(alone) == pytest.approx(expected * norm**2, rel=0.1)
    if not diagonal:
        pairs = np.array([scatter[np.triu_indices(FEATURES, 1)] for scatter in scatters])
        assert np.std(pairs) == pytest.approx(expected * norm**2 / np.sqrt(2), rel=0.1)


def test_a_feature_that_is_too_long_is_shortened_and_keeps_its_direction():
    long = np.full((1, FEATURES), 100.0, np.float32)
    mean, scatter = hidden_moments([long], 1, noise(1e-9), name="0", feature_size=FEATURES, diagonal=False)
    np.testing.assert_allclose(mean, np.full(FEATURES, 2.0 / 3.0), atol=1e-6)
    assert not scatter.any()
