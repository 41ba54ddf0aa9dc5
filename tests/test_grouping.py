"""Groups of devices: the oracles are blobs whose groups are known, and brute force on small cases."""

import itertools
import warnings

import numpy as np
import pytest

from edge_sdk.errors import RunError, TensorError
from edge_server.grouping import group


@pytest.fixture(autouse=True)
def _no_warning_leaks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def blobs(devices: int, groups: int, dims: int = 8) -> tuple[dict[str, np.ndarray], list[int]]:
    """Hashes around ``groups`` distant centres, and the centre of each device in the order of the ids."""
    draw = np.random.default_rng(0)
    centres = draw.integers(-40, 40, (groups, dims))
    owners = draw.integers(groups, size=devices)
    hashes = centres[owners] + draw.integers(-1, 2, (devices, dims))
    return {f"d{i:03}": row for i, row in enumerate(hashes)}, owners.tolist()


def same_partition(labels, owners) -> bool:
    return len(set(zip(labels, owners, strict=True))) == len(set(labels)) == len(set(owners))


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_devices_around_one_centre_are_one_group(dtype):
    descriptors, owners = blobs(60, 10)
    found = group({name: row.astype(dtype) for name, row in descriptors.items()}, groups=10, seed=1)
    assert same_partition(found.values(), owners)


def test_groups_are_numbered_by_their_first_ids():
    descriptors, _ = blobs(60, 10)
    labels = [group(descriptors, groups=10, seed=2)[name] for name in sorted(descriptors)]
    assert list(dict.fromkeys(labels)) == list(range(10))


def test_the_groups_do_not_depend_on_the_order_of_the_devices():
    draw = np.random.default_rng(1)
    descriptors = {f"d{i}": draw.standard_normal(6) for i in range(40)}
    backwards = dict(reversed(descriptors.items()))
    assert group(backwards, groups=7, seed=3) == group(descriptors, groups=7, seed=3)


def test_a_few_devices_are_grouped_as_brute_force_does():
    values = np.random.default_rng(2).integers(-9, 9, (8, 2))
    descriptors = {f"d{i}": row for i, row in enumerate(values)}

    def spread(labels) -> float:
        parts = [values[np.array(labels) == label] for label in set(labels)]
        return sum(((part - part.mean(0)) ** 2).sum() for part in parts)

    best = min(spread(labels) for labels in itertools.product(range(3), repeat=8))
    assert spread(list(group(descriptors, groups=3, seed=0).values())) == pytest.approx(best)


@pytest.mark.parametrize("groups", [5, 6, 100])
def test_no_more_devices_than_groups_are_each_alone(groups):
    descriptors, _ = blobs(5, 5)
    assert sorted(group(descriptors, groups=groups, seed=0).values()) == [0, 1, 2, 3, 4]


def test_identical_hashes_are_one_group():
    descriptors = {f"d{i}": np.array([3, -1, 4]) for i in range(20)}
    assert set(group(descriptors, groups=10, seed=0).values()) == {0}


def test_devices_with_the_same_hash_are_never_parted():
    rows = np.random.default_rng(3).integers(0, 2, (50, 3))
    found = group({f"d{i}": row for i, row in enumerate(rows)}, groups=4, seed=0)
    assert len({(tuple(row), found[f"d{i}"]) for i, row in enumerate(rows)}) == len(np.unique(rows, axis=0))


def test_features_that_differ_by_nothing_to_speak_of_leave_no_group_empty():
    descriptors = {f"d{i}": np.full(4, 1.0 + i * 2.0**-52) for i in range(30)}
    found = set(group(descriptors, groups=8, seed=0).values())
    assert found == set(range(len(found)))


def test_a_seed_may_have_more_than_32_bits():
    descriptors, owners = blobs(60, 10)
    assert same_partition(group(descriptors, groups=10, seed=1 << 60).values(), owners)


def test_one_group_holds_all_and_no_devices_make_none():
    descriptors, _ = blobs(9, 3)
    assert set(group(descriptors, groups=1, seed=0).values()) == {0}
    assert group({}, groups=10, seed=0) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros(3),
        np.zeros((2, 2)),
        np.array([0, 0, np.nan, 0]),
        np.array([0, np.inf, 0, 0]),
        np.full(4, 1e200),
        np.full(4, 1 << 60),
    ],
)
def test_a_descriptor_of_no_use_names_its_device(wrong):
    descriptors = {f"d{i}": np.full(4, i) for i in range(5)} | {"rogue": wrong}
    with pytest.raises(TensorError, match="'rogue'"):
        group(descriptors, groups=2, seed=0)


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"seed": -1}])
def test_impossible_groups_are_refused(wrong):
    with pytest.raises(RunError, match="cannot make"):
        group(blobs(5, 2)[0], **{"groups": 2, "seed": 0, **wrong})
