import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from edge_sdk.errors import DataError
from edge_simulation.partition import balanced, client_imbalanced, long_tail

BALANCED = np.repeat(np.arange(10), 600)


@settings(deadline=None, max_examples=80)
@given(
    labels=st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=90),
    devices=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_balanced_devices_differ_by_one_example_in_all_and_in_each_class(labels, devices, seed):
    labels = np.array(labels * devices)
    partition = balanced(labels, devices=devices, seed=seed)
    histogram = partition.histogram(labels, 8)
    assert np.ptp(histogram, axis=0).max() <= 1
    assert np.ptp(histogram.sum(axis=1)) <= 1
    assert sorted(np.concatenate(partition.indices).tolist()) == list(range(len(labels)))


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=50),
    devices=st.integers(1, 60),
    divergence=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**32),
)
def test_client_imbalanced_puts_every_example_on_one_device(sizes, devices, divergence, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    devices = min(devices, len(labels))
    partition = client_imbalanced(
        labels, devices=devices, seed=seed, divergence=divergence * math.log(len(sizes))
    )
    assert min(len(part) for part in partition.indices) >= 1
    assert sorted(np.concatenate(partition.indices).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize(("classes", "divergence"), [(10, 0.55), (10, 0.1), (10, 1.5), (47, 0.55), (2, 0.3)])
def test_devices_are_as_far_from_uniform_as_asked(classes, divergence):
    labels = np.repeat(np.arange(classes), 20_000)
    found = [
        stats.entropy(row, np.ones(classes))
        for seed in range(10)
        for row in client_imbalanced(labels, devices=100, seed=seed, divergence=divergence).histogram(
            labels, classes
        )
    ]
    assert np.mean(found) == pytest.approx(divergence, rel=0.06)


def test_a_hundred_devices_of_fashion_mnists_size_start_near_astraeas_divergence():
    labels = np.repeat(np.arange(10), 6000)
    summary = client_imbalanced(labels, devices=100, seed=0).summary(labels, 10)
    assert summary.divergence_from_uniform == pytest.approx(0.55, abs=0.06)
    assert summary.largest > 3 * summary.smallest
    assert (summary.left_over, summary.reassigned) == (0, 0)


@pytest.mark.parametrize("divergence", [0, -1, math.log(10), math.nan])
def test_a_divergence_that_ten_classes_cannot_have_is_refused(divergence):
    with pytest.raises(DataError, match="10 classes"):
        client_imbalanced(BALANCED, devices=10, seed=0, divergence=divergence)


def test_one_class_is_always_uniform_and_is_refused():
    with pytest.raises(DataError, match="1 classes"):
        client_imbalanced(np.zeros(100, int), devices=10, seed=0)


def test_missing_scipy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(DataError, match=r"edge-sdk-fl\[simulation\]"):
        client_imbalanced(BALANCED, devices=10, seed=0)


@pytest.mark.parametrize(
    ("ratio", "published"),
    [
        (10, [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]),
        (100, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
    ],
)
def test_the_tail_is_that_of_long_tailed_cifar(ratio, published):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
    kept = long_tail(labels, ratio=ratio, seed=0)
    assert np.bincount(labels[kept]).tolist() == published


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.integers(30, 90), min_size=1, max_size=40),
    ratio=st.floats(1, 20),
    seed=st.integers(0, 2**32),
)
def test_any_set_keeps_the_profile_in_distinct_examples(sizes, ratio, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    kept = long_tail(labels, ratio=ratio, seed=seed)
    counts = np.bincount(labels[kept], minlength=len(sizes))
    profile = np.geomspace(1, 1 / ratio, len(sizes))
    assert (np.diff(kept) > 0).all()
    assert (counts <= sizes).all()
    # Each count is the profile's, rounded down, at the largest scale that the set allows.
    scale = min(np.array(sizes) / profile)
    assert (abs(counts + 0.5 - scale * profile) <= 0.5 + 1e-6).all()
    assert (kept == long_tail(labels, ratio=ratio, seed=seed)).all()


def test_the_kept_examples_follow_the_seed():
    first, other = (set(long_tail(BALANCED, ratio=10, seed=seed).tolist()) for seed in (0, 1))
    assert first != other
    assert len(first) == len(other)


@pytest.mark.parametrize("ratio", [0.5, math.nan, math.inf, 1000])
def test_a_ratio_out_of_range_is_refused(ratio):
    with pytest.raises(DataError, match="ratio"):
        long_tail(BALANCED, ratio=ratio, seed=0)
