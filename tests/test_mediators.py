"""Astraea's two pieces on the server: how much a class is augmented, and who is chained with whom."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr

from edge_sdk.errors import RunError
from edge_server.mediators import chains, divergence, multiples

ROUNDS = st.integers(2, 5).flatmap(
    lambda classes: st.dictionaries(
        st.text("abcd", min_size=1, max_size=4),
        st.lists(st.integers(0, 20), min_size=classes, max_size=classes).map(np.array),
        min_size=1,
        max_size=12,
    )
)


def kl(counts):
    """The oracle: scipy's relative entropy to the uniform distribution."""
    return float(rel_entr(counts / np.sum(counts), 1 / len(counts)).sum())


def skewed(devices, classes, alpha, seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"d{number:03}": rng.multinomial(200, rng.dirichlet(np.full(classes, alpha)))
        for number in range(devices)
    }


@given(ROUNDS, st.integers(1, 5))
def test_no_other_device_would_bring_a_mediator_closer_to_uniform(histograms, longest):
    left = {device for device, counts in histograms.items() if counts.any()}
    for chain in chains(histograms, longest=longest):
        mediator = 0
        for device in chain:
            if device in left:
                mine = kl(mediator + histograms[device])
                assert all(mine <= kl(mediator + histograms[other]) + 1e-9 for other in left)
                mediator = mediator + histograms[device]
                left.remove(device)
    assert not left


@given(ROUNDS, st.integers(1, 5))
def test_every_device_is_placed_once_and_chains_are_full_but_the_last(histograms, longest):
    found = chains(histograms, longest=longest)
    assert sorted(device for chain in found for device in chain) == sorted(histograms)
    assert len(found) == math.ceil(len(histograms) / longest)
    assert all(len(chain) == longest for chain in found[:-1])


@given(ROUNDS, st.integers(1, 5))
def test_devices_that_share_no_counts_come_last(histograms, longest):
    order = [device for chain in chains(histograms, longest=longest) for device in chain]
    shares = [bool(histograms[device].any()) for device in order]
    assert shares == sorted(shares, reverse=True)


@given(ROUNDS, st.randoms())
def test_chains_do_not_depend_on_the_mappings_order(histograms, random):
    shuffled = list(histograms.items())
    random.shuffle(shuffled)
    assert chains(dict(shuffled), longest=3) == chains(histograms, longest=3)


def test_chains_are_those_of_the_papers_procedure_written_out():
    histograms = skewed(60, 10, 0.5)
    waiting, expected = dict(histograms), []
    while waiting:
        mediator, chain = np.zeros(10), []
        while waiting and len(chain) < 7:
            best = min(waiting, key=lambda device: kl(mediator + waiting[device]))
            mediator = mediator + waiting.pop(best)
            chain.append(best)
        expected.append(chain)
    assert chains(histograms, longest=7) == expected


def test_equal_devices_are_taken_by_their_ids():
    histograms = {device: np.array([3, 3]) for device in ("c", "a", "b")}
    assert chains(histograms, longest=2) == [["a", "b"], ["c"]]


def test_devices_that_differ_in_their_classes_order_alone_are_ties():
    counts = np.array([3, 5, 7, 11, 13, 17, 19])
    histograms = {f"d{n:02}": np.random.default_rng(n).permutation(counts) for n in range(50)}
    assert chains(histograms, longest=1) == [[device] for device in histograms]


def test_one_class_devices_are_chained_into_full_sets_of_classes():
    histograms = {f"d{n:02}": np.eye(10, dtype=np.int64)[n % 10] * 30 for n in range(100)}
    for chain in chains(histograms, longest=10):
        assert (sum(histograms[device] for device in chain) == 30).all()


@pytest.mark.parametrize(
    ("devices", "classes", "alpha"),
    [(500, 47, 0.92), (100, 10, 0.6)],
)
def test_chains_bring_a_split_like_the_papers_from_its_divergence_to_below_its_result(
    devices, classes, alpha
):
    histograms = skewed(devices, classes, alpha)
    alone = np.mean([divergence(counts) for counts in histograms.values()])
    chosen = dict(list(histograms.items())[:50])
    after = [divergence(sum(chosen[device] for device in chain)) for chain in chains(chosen, longest=10)]
    assert alone == pytest.approx(0.55, abs=0.05)
    assert np.mean(after) < 0.125


def test_no_devices_make_no_chains():
    assert chains({}, longest=3) == []


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=50).filter(any))
def test_the_divergence_is_scipys_relative_entropy(counts):
    assert divergence(np.array(counts)) == pytest.approx(kl(counts), abs=1e-9)


def test_balanced_counts_do_not_diverge():
    assert divergence(np.full(47, 12345)) == pytest.approx(0, abs=1e-12)


def test_one_class_alone_and_no_counts_diverge_most():
    assert divergence(np.array([0, 9, 0])) == pytest.approx(math.log(3))
    assert divergence(np.zeros(3, np.int64)) == pytest.approx(math.log(3))


def test_shares_diverge_as_their_counts_do():
    assert divergence(np.array([0.3, 0.7])) == pytest.approx(divergence(np.array([3, 7])))


def test_the_multiple_of_a_rare_class_is_its_ratio_to_the_mean_to_the_alpha():
    found = multiples(np.array([100, 10, 1, 49]), 0.67)
    assert found == {1: pytest.approx(4**0.67, abs=5e-4), 2: pytest.approx(40**0.67, abs=5e-4)}


def test_alpha_one_brings_every_rare_class_to_the_mean():
    counts = np.array([900, 30, 7, 63])
    found = multiples(counts, 1.0)
    for label in (1, 2, 3):
        assert counts[label] * found[label] == pytest.approx(250, abs=5e-4 * counts[label])


def test_a_multiple_that_rounds_to_one_is_none():
    assert multiples(np.array([100_000, 99_999]), 1.0) == {}


def test_alpha_zero_augments_nothing():
    assert multiples(np.array([100, 1]), 0) == {}


def test_neither_empty_classes_nor_those_at_the_mean_are_augmented():
    assert set(multiples(np.array([10, 0, 5, 5]), 1.0)) == set()
    assert multiples(np.array([0, 0]), 1.0) == {}


@pytest.mark.parametrize("alpha", [-0.1, 10.5, float("nan"), float("inf")])
def test_an_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(RunError, match="augmentation alpha"):
        multiples(np.array([1, 2]), alpha)


@pytest.mark.parametrize("counts", [[-1, 2], [[1, 2]], [], [float("nan"), 1], ["a"]])
def test_counts_that_are_none_are_refused_by_their_devices_name(counts):
    with pytest.raises(RunError, match="the histogram of device tiger"):
        chains({"tiger": np.array(counts)}, longest=1)


def test_histograms_of_different_lengths_are_refused():
    with pytest.raises(RunError, match="different lengths"):
        chains({"a": np.array([1]), "b": np.array([1, 2])}, longest=1)


def test_a_chain_of_none_is_refused():
    with pytest.raises(RunError, match="at most 0 devices"):
        chains({"a": np.array([1])}, longest=0)
