from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from edge_sdk.errors import DataError
from edge_simulation.partition import Partition, dirichlet_per_class, long_tail, plot_histogram

LABELS = np.repeat(np.arange(4), [40, 30, 20, 10])
HAND = Partition(
    "by hand", [np.arange(40, 50), np.array([0, 50, 75, 99]), np.arange(0)], seed=0, reassigned=3
)


def test_the_summary_counts_what_is_where():
    summary = HAND.summary(LABELS, 4)
    assert (summary.name, summary.devices, summary.reassigned) == ("by hand", 3, 3)
    assert (summary.examples, summary.left_over, summary.smallest, summary.largest) == (14, 86, 0, 10)
    assert summary.classes_per_device == pytest.approx((1 + 4 + 0) / 3)


def test_divergences_are_scipys_over_the_devices_that_hold_examples():
    partition = dirichlet_per_class(LABELS, devices=6, alpha=0.3, seed=1)
    summary, counts = partition.summary(LABELS, 5), partition.histogram(LABELS, 5)
    uniform = [stats.entropy(row, np.full(5, 0.2)) for row in counts]
    whole = [stats.entropy(row, counts.sum(axis=0)) for row in counts]
    assert summary.divergence_from_uniform == pytest.approx(np.mean(uniform))
    assert summary.divergence_from_global == pytest.approx(np.mean(whole))


def test_a_device_without_examples_has_no_divergence():
    full = Partition("full", HAND.indices[:2], seed=0)
    assert HAND.summary(LABELS, 4).divergence_from_uniform == full.summary(LABELS, 4).divergence_from_uniform


def test_a_partition_without_examples_is_no_nan():
    assert Partition("none", [np.arange(0)], seed=0).summary(LABELS, 4).divergence_from_global == 0


def test_a_label_beyond_the_classes_is_refused():
    with pytest.raises(DataError, match="label 3, expected 0 to 2"):
        HAND.histogram(LABELS, 3)


def test_a_part_of_a_set_is_divided_as_a_set_of_its_own():
    kept = long_tail(LABELS, ratio=4, seed=0)[::-1]
    part = dirichlet_per_class(LABELS[kept], devices=5, alpha=1.0, seed=0)
    whole = part.within(kept)
    assert (part.histogram(LABELS[kept], 4) == whole.histogram(LABELS, 4)).all()
    assert sorted(np.concatenate(whole.indices).tolist()) == sorted(kept.tolist())
    assert all((np.diff(indices) > 0).all() for indices in whole.indices)


@pytest.mark.parametrize("subset", [np.arange(99), np.zeros(100, int)])
def test_a_subset_that_was_not_divided_is_refused(subset):
    with pytest.raises(DataError, match="subset"):
        HAND.within(subset)


def test_the_plot_is_an_svg_with_a_bar_a_device():
    partition = dirichlet_per_class(LABELS, devices=7, alpha=0.5, seed=0)
    root = ElementTree.fromstring(plot_histogram(partition, LABELS, ("<b>", *"123")))
    assert root.tag.endswith("svg")
    assert len([element for element in root.iter() if element.get("class") == "device"]) == 7
    assert "dirichlet_per_class(alpha=0.5)" in "".join(root.itertext())
