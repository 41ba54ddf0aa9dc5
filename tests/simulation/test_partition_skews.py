"""The partitions with a law of their own beside Hsu's: per class, shards, quantity skew, natural, IID."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from edge_sdk.errors import DataError
from edge_simulation.partition import dirichlet_per_class, iid, natural, quantity_skew, shards

BALANCED = np.repeat(np.arange(10), 600)
ALPHAS = st.one_of(
    st.sampled_from([0.0, 5e-324, 1e-6, 0.1, 1.0, 1e6, np.finfo(float).max, math.inf]),
    st.floats(-6, 6).map(lambda power: 10.0**power),
)
SKEWS = {
    "per class": lambda labels, devices, alpha, seed: dirichlet_per_class(
        labels, devices=devices, alpha=alpha, seed=seed, least=2
    ),
    "quantity": lambda labels, devices, alpha, seed: quantity_skew(
        labels, devices=devices, beta=alpha, seed=seed, least=2
    ),
    "shards": lambda labels, devices, alpha, seed: shards(
        labels, devices=devices, shards_per_device=2, seed=seed
    ),
    "iid": lambda labels, devices, alpha, seed: iid(labels, devices=devices, seed=seed),
}


@pytest.mark.parametrize("skew", SKEWS)
@settings(deadline=None, max_examples=60)
@given(
    classes=st.integers(1, 60),
    devices=st.integers(1, 100),
    surplus=st.integers(0, 50),
    alpha=ALPHAS,
    seed=st.integers(0, 2**32),
)
def test_every_example_is_on_one_device_and_none_is_short(skew, classes, devices, surplus, alpha, seed):
    labels = np.random.default_rng(seed).integers(0, classes, 2 * devices + surplus)
    partition, again = (SKEWS[skew](labels, devices, alpha, seed) for _ in range(2))
    assert len(partition) == devices
    assert min(len(part) for part in partition.indices) >= 2
    assert sorted(np.concatenate(partition.indices).tolist()) == list(range(len(labels)))
    assert all((np.diff(part) > 0).all() for part in partition.indices)
    assert all((a == b).all() for a, b in zip(partition.indices, again.indices, strict=True))


@pytest.mark.parametrize("skew", SKEWS)
def test_another_seed_gives_another_partition(skew):
    first, other = (SKEWS[skew](BALANCED, 20, 1.0, seed) for seed in (0, 1))
    assert any(a.tolist() != b.tolist() for a, b in zip(first.indices, other.indices, strict=True))


@pytest.mark.parametrize(("divide", "settings"), [(iid, {}), (quantity_skew, {"beta": 1.0, "least": 50})])
def test_labels_are_independent_of_the_device(divide, settings):
    chances = [
        stats.chi2_contingency(
            divide(BALANCED, devices=10, seed=seed, **settings).histogram(BALANCED, 10)
        ).pvalue
        for seed in range(50)
    ]
    assert stats.kstest(chances, "uniform").pvalue > 0.01


def test_class_shares_have_the_moments_of_a_dirichlet_over_the_devices():
    devices, alpha = 8, 0.7
    shares = np.concatenate(
        [
            dirichlet_per_class(BALANCED, devices=devices, alpha=alpha, seed=seed, least=0).histogram(
                BALANCED, 10
            )
            for seed in range(300)
        ],
        axis=1,
    )
    law = stats.dirichlet(np.full(devices, alpha))
    assert np.allclose(shares.mean(axis=1) / 600, law.mean(), atol=0.01)
    assert np.allclose((shares / 600).var(axis=1), law.var(), rtol=0.1)


def test_sizes_have_the_moments_of_a_dirichlet():
    sizes = np.array(
        [
            [len(part) for part in quantity_skew(BALANCED, devices=8, beta=2.0, seed=seed, least=0).indices]
            for seed in range(1000)
        ]
    )
    law = stats.dirichlet(np.full(8, 2.0))
    assert np.allclose(sizes.mean(axis=0) / 6000, law.mean(), atol=0.01)
    assert np.allclose((sizes / 6000).var(axis=0), law.var(), rtol=0.15)


def test_an_infinite_alpha_splits_every_class_evenly():
    histogram = dirichlet_per_class(BALANCED, devices=7, alpha=math.inf, seed=0).histogram(BALANCED, 10)
    assert histogram.min() >= 85
    assert histogram.max() <= 86


def test_at_alpha_zero_a_class_is_on_one_device():
    histogram = dirichlet_per_class(BALANCED, devices=5, alpha=0, seed=0, least=0).histogram(BALANCED, 10)
    assert ((histogram > 0).sum(axis=0) == 1).all()


def test_a_draw_that_leaves_a_device_short_is_redrawn_before_it_is_repaired():
    def divided(least):
        return [
            dirichlet_per_class(BALANCED, devices=5, alpha=1.0, seed=seed, least=least) for seed in range(10)
        ]

    free, held = divided(0), divided(800)
    assert min(len(part) for partition in free for part in partition.indices) < 800
    assert min(len(part) for partition in held for part in partition.indices) >= 800
    assert [partition.reassigned for partition in held] == [0] * 10


def test_the_repaired_examples_are_counted():
    # Ten classes, each on one of a hundred devices: ninety or more have nothing.
    partition = dirichlet_per_class(BALANCED, devices=100, alpha=0, seed=0, least=10)
    assert 900 <= partition.reassigned <= 950
    assert min(len(part) for part in partition.indices) == 10


def test_two_shards_a_device_are_two_classes_at_most():
    partition = shards(BALANCED, devices=100, shards_per_device=2, seed=0)
    assert {len(part) for part in partition.indices} == {60}
    held = (partition.histogram(BALANCED, 10) > 0).sum(axis=1)
    # Two shards of 200 in random order are of different classes with chance 180/199.
    assert held.max() == 2
    assert 80 <= (held == 2).sum() <= 98


def test_a_shard_holds_any_examples_of_its_class():
    partition = shards(BALANCED, devices=100, shards_per_device=2, seed=0)
    assert max(np.diff(part).max() for part in partition.indices) > 30
    spread = [np.ptp(part[BALANCED[part] == BALANCED[part[0]]]) for part in partition.indices]
    assert min(spread) > 300


def test_people_are_devices_in_ascending_order():
    people = np.array(["Eve", "Ada", "Eve", "Bob", "Ada"])
    assert [part.tolist() for part in natural(people).indices] == [[1, 4], [3], [0, 2]]


@pytest.mark.parametrize("people", [np.zeros(0, int), np.zeros((2, 2), int), np.zeros(3)])
def test_what_names_no_people_is_refused(people):
    with pytest.raises(DataError, match="people"):
        natural(people)


@pytest.mark.parametrize(
    ("divide", "wrong"),
    [
        (dirichlet_per_class, {"alpha": -1}),
        (dirichlet_per_class, {"alpha": math.nan}),
        (dirichlet_per_class, {"alpha": 1, "least": 601}),
        (dirichlet_per_class, {"alpha": 1, "least": -1}),
        (dirichlet_per_class, {"alpha": 1, "seed": -1}),
        (quantity_skew, {"beta": math.nan}),
        (quantity_skew, {"beta": 1, "devices": 0}),
        (shards, {"shards_per_device": 0}),
        (shards, {"shards_per_device": 601}),
        (iid, {"devices": 6001}),
    ],
)
def test_arguments_out_of_range_are_refused(divide, wrong):
    with pytest.raises(DataError):
        divide(BALANCED, **{"devices": 10, "seed": 0, **wrong})
