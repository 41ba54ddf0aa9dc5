import math
import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from edge_sdk.errors import DataError
from edge_simulation.partition import dirichlet_hsu

BALANCED = np.repeat(np.arange(10), 600)
ALPHAS = st.one_of(
    st.sampled_from([0.0, 1e-320, 1e-6, 1e-3, 0.01, 0.1, 1.0, 100.0, 1e6, math.inf]),
    st.floats(min_value=0, allow_nan=False),
)


@settings(deadline=None, max_examples=150)
@given(
    labels=st.lists(st.sampled_from([0, 1, 2, 3, 9]), min_size=1, max_size=120),
    devices=st.integers(1, 15),
    alpha=ALPHAS,
    seed=st.integers(0, 2**32),
)
def test_shares_are_exact_and_every_example_is_on_one_device(labels, devices, alpha, seed):
    labels = np.array(labels)
    if devices > len(labels):
        with pytest.raises(DataError, match="each needs one"):
            dirichlet_hsu(labels, devices=devices, alpha=alpha, seed=seed)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition = dirichlet_hsu(labels, devices=devices, alpha=alpha, seed=seed)
    drawn = np.concatenate(partition.indices)
    assert [len(part) for part in partition.indices] == [
        len(part) for part in np.array_split(labels, devices)
    ]
    assert sorted(drawn.tolist()) == list(range(len(labels)))


@settings(deadline=None, max_examples=50)
@given(
    classes=st.integers(1, 60),
    devices=st.integers(1, 120),
    alpha=st.floats(-6, 6).map(lambda power: 10.0**power),
    seed=st.integers(0, 2**32),
)
def test_devices_may_outnumber_the_examples_of_a_class(classes, devices, alpha, seed):
    labels = np.arange(2 * devices) % classes
    partition = dirichlet_hsu(labels, devices=devices, alpha=alpha, seed=seed)
    assert {len(part) for part in partition.indices} == {2}
    assert sorted(np.concatenate(partition.indices).tolist()) == list(range(2 * devices))


@given(share=st.integers(1, 30), alpha=ALPHAS)
def test_a_share_that_is_asked_for_leaves_the_rest_over(share, alpha):
    partition = dirichlet_hsu(np.arange(300) % 7, devices=10, alpha=alpha, seed=0, share=share)
    drawn = np.concatenate(partition.indices)
    assert [len(part) for part in partition.indices] == [share] * 10
    assert len(set(drawn.tolist())) == 10 * share


@settings(deadline=None, max_examples=30)
@given(alpha=ALPHAS, seed=st.integers(0, 2**32))
def test_the_seed_determines_the_partition(alpha, seed):
    first, again = (dirichlet_hsu(BALANCED, devices=20, alpha=alpha, seed=seed) for _ in range(2))
    assert all((a == b).all() for a, b in zip(first.indices, again.indices, strict=True))


def test_another_seed_gives_another_partition():
    first, other = (dirichlet_hsu(BALANCED, devices=20, alpha=1.0, seed=seed) for seed in (0, 1))
    assert any((a != b).any() for a, b in zip(first.indices, other.indices, strict=True))


def test_class_shares_have_the_mean_and_variance_of_the_dirichlet():
    # A pool so large that no class runs out: E q = p, Var q = p(1-p)/(α+1), plus the multinomial's own.
    labels = np.repeat(np.arange(4), [8000, 16000, 24000, 32000])
    prior, alpha, share = np.array([0.1, 0.2, 0.3, 0.4]), 2.0, 100
    shares = (
        np.concatenate(
            [
                dirichlet_hsu(labels, devices=50, alpha=alpha, seed=seed, share=share).histogram(labels, 4)
                for seed in range(60)
            ]
        )
        / share
    )
    variance = prior * (1 - prior) / (alpha + 1) * (1 + alpha / share)
    assert np.allclose(shares.mean(axis=0), prior, atol=0.02)
    assert np.allclose(shares.var(axis=0), variance, rtol=0.1)


def one_by_one(labels, devices, alpha, generator):
    """The paper's text: one example after another, a class that runs out is renormalised away."""
    left = np.bincount(labels)
    counts = np.zeros((devices, len(left)), int)
    for device in range(devices):
        q = generator.dirichlet(alpha * np.bincount(labels) / len(labels))
        for _ in range(len(labels) // devices):
            open_q = np.where(left > 0, q, 0)
            drawn = generator.choice(len(left), p=open_q / open_q.sum())
            left[drawn] -= 1
            counts[device, drawn] += 1
    return counts


def test_counts_have_the_law_of_drawing_one_example_after_another():
    labels, generator = np.repeat([0, 1, 2], [2, 3, 4]), np.random.default_rng(0)
    ours, reference = Counter(), Counter()
    for seed in range(2000):
        partition = dirichlet_hsu(labels, devices=3, alpha=2.0, seed=seed)
        ours[partition.histogram(labels, 3).tobytes()] += 1
        reference[one_by_one(labels, 3, 2.0, generator).tobytes()] += 1
    table = np.array([[count[key] for key in ours | reference] for count in (ours, reference)])
    common = table[:, table.sum(axis=0) >= 40]
    assert common.sum() > 3000
    assert stats.chi2_contingency(common).pvalue > 0.01


@pytest.mark.parametrize("alpha", [1e-6, 1e-300, 5e-324])
def test_at_a_tiny_alpha_a_class_is_drawn_as_often_as_it_is_frequent(alpha):
    labels = np.repeat([0, 1, 2], [1000, 2000, 7000])
    first = [
        dirichlet_hsu(labels, devices=2, alpha=alpha, seed=seed, share=1).histogram(labels, 3)[0]
        for seed in range(1000)
    ]
    assert stats.chisquare(np.sum(first, axis=0), [100, 200, 700]).pvalue > 0.01


def test_the_largest_alpha_reassigns_none():
    assert dirichlet_hsu(BALANCED, devices=10, alpha=np.finfo(float).max, seed=0).reassigned == 0


@pytest.mark.parametrize("alpha", [1e6, math.inf])
def test_large_alpha_is_iid(alpha):
    partition = dirichlet_hsu(BALANCED, devices=10, alpha=alpha, seed=0)
    # The last device gets what the others' chance has left over.
    assert abs(partition.histogram(BALANCED, 10) - 60)[:-1].max() < 35
    assert partition.reassigned == 0


def test_tiny_alpha_leaves_a_device_one_class_and_reports_the_rest():
    partition = dirichlet_hsu(BALANCED, devices=100, alpha=1e-6, seed=0)
    histogram = partition.histogram(BALANCED, 10)
    pure = (histogram.max(axis=1) == 60).sum()
    assert 50 < pure < 100
    assert 0 < partition.reassigned <= 60 * (100 - pure)


def test_alpha_zero_gives_each_class_its_devices():
    partition = dirichlet_hsu(BALANCED, devices=20, alpha=0, seed=0)
    histogram = partition.histogram(BALANCED, 10)
    assert (histogram.max(axis=1) == 300).all()
    assert ((histogram > 0).sum(axis=0) == 2).all()
    assert partition.reassigned == 0


def test_alpha_zero_reports_what_does_not_fit():
    labels = np.repeat([0, 1], [75, 25])
    partition = dirichlet_hsu(labels, devices=2, alpha=0, seed=0)
    assert partition.reassigned in (0, 25)
    assert [len(part) for part in partition.indices] == [50, 50]


def test_smaller_alpha_is_more_skewed():
    def classes_held(alpha):
        return (dirichlet_hsu(BALANCED, devices=50, alpha=alpha, seed=0).histogram(BALANCED, 10) > 0).mean()

    assert classes_held(0.01) < classes_held(0.1) < classes_held(1.0) < classes_held(100.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": -1},
        {"alpha": math.nan},
        {"devices": 0},
        {"devices": 6001},
        {"share": 0},
        {"share": 601},
        {"seed": -1},
        {"labels": BALANCED.astype(float)},
        {"labels": BALANCED - 1},
        {"labels": np.zeros(0, int)},
    ],
)
def test_arguments_out_of_range_are_refused(wrong):
    arguments = {"labels": BALANCED, "devices": 10, "alpha": 1.0, "seed": 0, **wrong}
    with pytest.raises(DataError):
        dirichlet_hsu(arguments.pop("labels"), **arguments)


def test_the_name_says_which_alpha():
    assert dirichlet_hsu(BALANCED, devices=2, alpha=0.5, seed=0).name == "dirichlet_hsu(alpha=0.5)"
