import numpy as np
import pytest

from edge_sdk.data import ArrayDataset, as_dataset, split_held_out
from edge_sdk.errors import DataError

EXAMPLES = [(np.full((2, 2), i, np.uint8), i) for i in range(4)]


def test_a_list_is_used_as_it_is():
    assert as_dataset(EXAMPLES) is EXAMPLES


def test_a_generator_is_drawn_once():
    dataset = as_dataset(example for example in EXAMPLES)
    assert len(dataset) == 4
    assert dataset[3][1] == 3
    assert dataset[3][1] == 3


def test_an_iterable_is_drawn_anew_so_that_it_may_grow():
    class Growing:
        size = 1

        def __iter__(self):
            return iter(EXAMPLES[: self.size])

    source = Growing()
    assert len(as_dataset(source)) == 1
    source.size = 3
    assert len(as_dataset(source)) == 3


@pytest.mark.parametrize("source", [7, "abc", {"images": []}, None, (np.zeros((2, 2, 2)), np.zeros(2))])
def test_anything_else_is_an_error_that_names_the_fix(source):
    with pytest.raises(DataError, match="ArrayDataset"):
        as_dataset(source)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (np.zeros((3, 2, 2), np.uint8), np.zeros(2, int)),
        (np.zeros((3, 2), np.uint8), np.zeros(3, int)),
        (np.zeros((3, 2, 2), np.float64), np.zeros(3, int)),
        (np.zeros((3, 2, 2), np.uint8), np.zeros(3)),
        (np.zeros((3, 2, 2), np.uint8), np.zeros((3, 1), int)),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(images, labels):
    with pytest.raises(DataError):
        ArrayDataset(images, labels)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.2, 1 / 3, 0.5, 0.9])
def test_both_sides_are_a_partition_of_about_the_fraction(fraction):
    train, held = split_held_out(1000, fraction, seed=3)
    assert sorted([*train, *held]) == list(range(1000))
    assert abs(len(held) - 1000 * fraction) <= 1


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.37, 0.5, 0.8])
def test_an_example_keeps_its_side_as_the_data_grows(fraction):
    _, final = split_held_out(500, fraction, seed=-1)
    for count in range(500):
        train, held = split_held_out(count, fraction, seed=-1)
        assert held.tolist() == [i for i in final if i < count]
        assert count == 0 or train[0] == 0


def test_held_out_does_not_follow_a_period_of_the_data():
    labels = np.arange(5000) % 5
    _, held = split_held_out(5000, 0.2, seed=0)
    assert np.bincount(labels[held], minlength=5).min() > 150


def test_another_seed_holds_out_others():
    assert split_held_out(100, 0.2, 0)[1].tolist() != split_held_out(100, 0.2, 1)[1].tolist()


@pytest.mark.parametrize(("count", "fraction"), [(-1, 0.1), (10, 1.0), (10, -0.1), (10, float("nan"))])
def test_an_impossible_split_is_refused(count, fraction):
    with pytest.raises(DataError):
        split_held_out(count, fraction, 0)
