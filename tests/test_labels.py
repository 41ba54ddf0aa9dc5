"""Reading a device's labels and counting them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_sdk.data import ArrayDataset
from edge_sdk.data.folder import ImageFolder
from edge_sdk.data.labels import histogram, labels_of
from edge_sdk.errors import DataError


class Unopened:
    """Tells its labels, has no images."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise AssertionError("an image was opened")

    def label_at(self, index):
        return index


def test_the_labels_are_those_at_the_indices_in_their_order():
    images = np.zeros((4, 2, 2), np.uint8)
    array = ArrayDataset(images, np.array([3, 1, 0, 2], np.uint8))
    for dataset in (array, list(array)):
        labels = labels_of(dataset, np.array([3, 0, 0]), 4)
        assert labels.tolist() == [2, 3, 3]
        assert labels.dtype == np.int64


def test_no_indices_give_no_labels():
    assert labels_of([], np.array([], np.int64), 4).shape == (0,)


def test_no_image_is_opened_where_a_data_set_tells_its_labels():
    assert labels_of(Unopened(), np.arange(3), 3).tolist() == [0, 1, 2]


def test_no_file_of_a_folder_is_opened(tmp_path: Path):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        Image.new("L", (2, 2)).save(tmp_path / name / "1.png")
    folder = ImageFolder.scan(tmp_path, channels=1)
    for path in folder.paths:
        path.unlink()
    assert labels_of(folder, np.arange(2), 2).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (("image", 2), "example 1: label 2, expected 0 to 1"),
        (("image", -1), "example 1: label -1"),
        (("image", 1 << 80), "example 1: label"),
        (("image", 1.0), "example 1: label 1.0 is not an integer"),
        (7, "example 1: not a pair"),
    ],
)
def test_a_bad_example_is_named_by_its_index(example, message):
    with pytest.raises(DataError, match=message):
        labels_of([("image", 0), example], np.arange(2), 2)


def test_a_bad_label_of_an_array_is_named_by_its_index():
    dataset = ArrayDataset(np.zeros((3, 2, 2), np.uint8), np.array([0, 1, 5]))
    with pytest.raises(DataError, match="example 2: label 5"):
        labels_of(dataset, np.arange(3), 5)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_the_data_set_is_refused(index):
    with pytest.raises(DataError, match=f"example {index}: the data set has only 2"):
        labels_of([("image", 0)] * 2, np.array([0, index]), 1)


def test_the_histogram_counts_every_label():
    labels = np.random.default_rng(0).integers(0, 7, 500).astype(np.uint8)
    counts = histogram(labels, 9)
    assert counts.dtype == np.int64
    assert counts.tolist() == [Counter(labels.tolist())[label] for label in range(9)]


def test_a_class_with_fewer_examples_than_the_threshold_is_withheld():
    labels = np.repeat(np.arange(4), [4, 5, 6, 1])
    assert histogram(labels, 5, withhold_below=5).tolist() == [0, 5, 6, 0, 0]


def test_no_labels_give_an_empty_histogram():
    assert histogram(np.array([]), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("labels", [[0, 3], [-1], [0.0], [[0]]])
def test_labels_out_of_range_are_not_counted(labels):
    with pytest.raises(DataError, match="expected integers"):
        histogram(np.array(labels), 3)
