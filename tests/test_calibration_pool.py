"""Pooled statistics, against numpy.cov on the data in one place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.errors import RunError
from edge_sdk.statistics import packed
from edge_server.calibration import pool

D = 5


def report(parts, covariance="full", rank=0):
    """What a device tells of its features, ``parts[label]`` being float64 [n, d]; in the plainest numpy."""
    told = {"count": [], "mean": [], "scatter": [], "factor": []}
    for x in parts:
        mean = x.mean(axis=0) if len(x) else np.zeros(x.shape[1])
        scatter = (x - mean).T @ (x - mean)
        told["count"].append(len(x))
        told["mean"].append(mean)
        if covariance == "low_rank":
            values, vectors = np.linalg.eigh(scatter)
            factor = np.sqrt(values.clip(0))[-rank:, None] * vectors.T[-rank:]
            told["factor"].append(factor)
            scatter = np.diag(scatter - factor.T @ factor)
        told["scatter"].append(packed(scatter) if covariance == "full" else np.array(scatter))
        if covariance == "diagonal":
            told["scatter"][-1] = np.diag(scatter)
    return {name: np.array(values) for name, values in told.items() if values}


def data(sizes, seed=0, offset=0.0):
    """Correlated features of each class, which lies somewhere of its own."""
    rng = np.random.default_rng(seed)
    return [
        offset + 3 * rng.standard_normal(D) + rng.standard_normal((n, D)) @ rng.standard_normal((D, D))
        for n in sizes
    ]


def dealt(classes, devices, seed=0):
    """Each class's samples, dealt to the devices at random; sorted first, so that devices differ."""
    rng = np.random.default_rng(seed)
    shares = []
    for x in classes:
        cuts = np.sort(rng.integers(0, len(x) + 1, devices - 1))
        shares.append(np.split(x[np.argsort(x[:, 0])], cuts))
    return [[shares[label][device] for label in range(len(classes))] for device in range(devices)]


def covariances(pooled, **options):
    return {label: covariance for label, _, covariance in pooled.gaussians(**options)}


def direct(x, covariance="full"):
    whole = np.cov(x.T)
    return np.diag(whole) if covariance == "diagonal" else whole


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("devices", [1, 2, 30])
def test_the_pool_is_the_direct_computation(covariance, devices):
    classes = data([200, 50, 7])
    pooled = pool([report(parts, covariance) for parts in dealt(classes, devices)], covariance=covariance)
    assert pooled.count.tolist() == [200, 50, 7]
    for label, mean, found in pooled.gaussians():
        np.testing.assert_allclose(mean, classes[label].mean(axis=0), rtol=0, atol=1e-12)
        np.testing.assert_allclose(found, direct(classes[label], covariance), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_mean_far_from_zero_costs_no_digits(covariance):
    classes = data([200, 50], offset=1e6)
    pooled = pool([report(parts, covariance) for parts in dealt(classes, 9)], covariance=covariance)
    for label, found in covariances(pooled).items():
        np.testing.assert_allclose(found, direct(classes[label], covariance), rtol=1e-8, atol=1e-8)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 12), min_size=1, max_size=3),
    devices=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    covariance=st.sampled_from(["full", "diagonal"]),
)
def test_the_pool_does_not_depend_on_split_or_order(sizes, devices, seed, covariance):
    classes = data(sizes, seed)
    reports = [report(parts, covariance) for parts in dealt(classes, devices, seed)]
    for ordered in (reports, reports[::-1]):
        for label, found in covariances(pool(ordered, covariance=covariance)).items():
            np.testing.assert_allclose(found, direct(classes[label], covariance), rtol=1e-8, atol=1e-8)


def test_what_lies_between_devices_counts():
    near, far = np.zeros((3, D)), np.ones((5, D))
    pooled = pool([report([near]), report([far])], covariance="full")
    np.testing.assert_allclose(covariances(pooled)[0], np.cov(np.vstack([near, far]).T), atol=1e-15)


def test_single_samples_of_many_devices_make_a_covariance():
    x = data([8])[0]
    pooled = pool([report([row[None]]) for row in x], covariance="full")
    np.testing.assert_allclose(covariances(pooled)[0], np.cov(x.T), rtol=1e-8, atol=1e-10)


def test_low_rank_of_full_rank_is_exact():
    classes = data([100, 40])
    reports = [report(parts, "low_rank", rank=D) for parts in dealt(classes, 4)]
    for label, found in covariances(pool(reports, covariance="low_rank")).items():
        np.testing.assert_allclose(found, np.cov(classes[label].T), rtol=1e-8, atol=1e-8)


def test_low_rank_keeps_the_diagonal():
    classes = data([100, 40])
    reports = [report(parts, "low_rank", rank=1) for parts in dealt(classes, 4)]
    for label, found in covariances(pool(reports, covariance="low_rank")).items():
        np.testing.assert_allclose(np.diag(found), classes[label].var(axis=0, ddof=1), rtol=1e-8)


def test_fewer_samples_than_features_are_pooled_exactly():
    x = data([3])[0]
    found = covariances(pool([report([x[:2]]), report([x[2:]])], covariance="full"))[0]
    np.testing.assert_allclose(found, np.cov(x.T), rtol=1e-8, atol=1e-10)
    assert np.linalg.matrix_rank(found) == 2


def within(classes):
    """The covariance within classes, from its definition."""
    centred = np.vstack([x - x.mean(axis=0) for x in classes if len(x)])
    return centred.T @ centred / sum(len(x) - 1 for x in classes if len(x))


@pytest.mark.parametrize("shrinkage", [0, 5.0])
def test_a_class_of_one_sample_has_the_covariance_within_classes(shrinkage):
    classes = data([30, 1, 12])
    found = covariances(pool([report(classes)], covariance="full"), shrinkage=shrinkage)
    np.testing.assert_allclose(found[1], within(classes), rtol=1e-10)


def test_without_a_class_of_two_samples_there_is_no_spread():
    found = covariances(pool([report(data([1, 0, 1]))], covariance="full"), shrinkage=5.0)
    assert sorted(found) == [0, 2]
    assert not any(covariance.any() for covariance in found.values())


def test_a_class_without_samples_has_no_gaussian():
    pooled = pool([report(data([4, 0, 9]))], covariance="full")
    assert [label for label, _, _ in pooled.gaussians()] == [0, 2]


def test_shrinkage_counts_as_samples_of_the_covariance_within_classes():
    classes = data([3, 400])
    found = covariances(pool([report(classes)], covariance="full"), shrinkage=5.0)
    expected = (2 * np.cov(classes[0].T) + 5 * within(classes)) / 7
    np.testing.assert_allclose(found[0], expected, rtol=1e-10)


def test_shrinkage_is_off_by_default():
    classes = data([3, 400])
    found = covariances(pool([report(classes)], covariance="full"))
    np.testing.assert_allclose(found[0], np.cov(classes[0].T), rtol=1e-10)


def test_the_reports_are_left_as_they_came():
    reports = [report(parts) for parts in dealt(data([20, 5]), 3)]
    before = [{name: array.copy() for name, array in told.items()} for told in reports]
    pool(reports, covariance="full")
    for told, copy in zip(reports, before, strict=True):
        assert all((told[name] == copy[name]).all() for name in told)


def test_reports_are_read_one_after_the_other():
    parts = dealt(data([20, 5]), 3)
    pooled = pool((report(part) for part in parts), covariance="full")
    assert pooled.count.tolist() == [20, 5]


@pytest.mark.parametrize("reports", [[], [report(data([0, 0]))]])
def test_nothing_told_is_refused_with_the_fix(reports):
    with pytest.raises(RunError, match="withheld"):
        pool(reports, covariance="full")
