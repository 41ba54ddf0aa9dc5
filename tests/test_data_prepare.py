import numpy as np
import pytest
from PIL import Image

from edge_sdk.data import ArrayDataset, batches, prepare
from edge_sdk.errors import DataError
from edge_sdk.manifest import Input

GREY = Input((1, 2, 3), (0.5,), (0.25,))
COLOUR = Input((3, 2, 4), (0.1, 0.2, 0.3), (0.5, 1.0, 2.0))


def test_bytes_are_scaled_and_normalised_a_channel():
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    images, labels = prepare([(image, 1)], np.array([0]), COLOUR, 2)
    expected = (image.transpose(2, 0, 1) / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array(
        [0.5, 1.0, 2.0]
    )[:, None, None]
    assert images.dtype == np.float32
    assert labels.dtype == np.int64
    np.testing.assert_allclose(images[0], expected, rtol=1e-5)


def test_floats_are_taken_as_they_are():
    images, _ = prepare([(np.full((2, 3), 0.5), 0)], np.array([0]), GREY, 2)
    assert (images == 0).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(5, 2, 4, 3), (5, 3, 2, 4)])
def test_the_fast_path_gives_the_bits_of_the_slow_one(dtype, shape):
    images = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    dataset = ArrayDataset(images, np.arange(5))
    before = images.copy()
    fast = prepare(dataset, np.array([4, 0, 2]), COLOUR, 5)
    slow = prepare(list(dataset), np.array([4, 0, 2]), COLOUR, 5)
    assert fast[0].tobytes() == slow[0].tobytes()
    assert fast[1].tolist() == slow[1].tolist() == [4, 0, 2]
    assert (images == before).all()


def test_pillow_images_and_lists_are_images():
    pixels = np.array([[0, 51, 102], [153, 204, 255]], np.uint8)
    sources = [(pixels, 0), (Image.fromarray(pixels), 0), (pixels.tolist(), 0), (pixels[..., None], 0)]
    images, _ = prepare(sources, np.arange(4), GREY, 2)
    assert all((image == images[0]).all() for image in images)


def test_a_palette_image_is_read_as_colours():
    image = Image.new("RGB", (4, 2), (255, 0, 51)).convert("P", palette=Image.Palette.ADAPTIVE)
    images, _ = prepare([(image, 0)], np.array([0]), Input((3, 2, 4), (0, 0, 0), (1, 1, 1)), 2)
    np.testing.assert_allclose(images[0, :, 0, 0], [1, 0, 0.2], atol=1e-6)


BAD = np.zeros((2, 3), np.float32)
BAD[1, 1] = np.nan


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ((np.zeros((3, 2)), 0), r"example 1: image has shape \[3, 2\], expected \[2, 3\]"),
        ((np.zeros((2, 3)), 2), "example 1: label 2, expected 0 to 1"),
        ((np.zeros((2, 3)), -1), "example 1: label -1"),
        ((np.zeros((2, 3)), 1 << 80), "example 1: label"),
        ((np.zeros((2, 3)), 1.0), "example 1: label 1.0 is not an integer"),
        ((np.zeros((2, 3)), "cat"), "example 1: label 'cat' is not an integer"),
        ((BAD, 0), "example 1: its image holds NaN"),
        ((np.full((2, 3), 1e300), 0), "example 1: its image holds NaN or infinite"),
        ((np.full((2, 3), 256), 0), "example 1: integer pixels"),
        (([[1, 2, 3], [4]], 0), "example 1: its image is no array"),
        ((np.full((2, 3), "x"), 0), "example 1: pixels are"),
        (np.zeros(3), "example 1: not a pair"),
        (7, "example 1: not a pair"),
    ],
)
def test_a_bad_example_is_named_by_its_index(example, message):
    with pytest.raises(DataError, match=message):
        prepare([(np.zeros((2, 3)), 0), example], np.array([0, 1]), GREY, 2)


def test_the_fast_path_names_the_index_too():
    dataset = ArrayDataset(np.stack([np.zeros((2, 3), np.float32), BAD]), np.array([0, 9]))
    with pytest.raises(DataError, match="example 1: label 9"):
        prepare(dataset, np.array([0, 1]), GREY, 2)
    with pytest.raises(DataError, match="example 1: its image holds NaN"):
        prepare(dataset, np.array([0, 1]), GREY, 10)
    with pytest.raises(DataError, match="example 2: the data set has only 2"):
        prepare(dataset, np.array([2]), GREY, 10)


@pytest.mark.parametrize("dataset", [[], ArrayDataset(np.zeros((0, 2, 3), np.uint8), np.zeros(0, int))])
def test_an_empty_set_is_refused(dataset):
    with pytest.raises(DataError, match="empty"):
        prepare(dataset, np.array([], int), GREY, 2)


def test_every_epoch_sees_every_example_once_in_a_new_order():
    drawn = [batch.tolist() for batch in batches(10, batch_size=4, epochs=2, seed=5)]
    assert [len(batch) for batch in drawn] == [4, 4, 2, 4, 4, 2]
    first, second = np.concatenate(drawn[:3]).tolist(), np.concatenate(drawn[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_batches_follow_numpys_generator_seeded_by_the_epoch():
    drawn = np.concatenate(list(batches(7, batch_size=7, epochs=2, seed=5)))
    expected = [np.random.default_rng([5, epoch]).permutation(7) for epoch in (0, 1)]
    assert drawn.tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"epochs": -1}, {"seed": -1}])
def test_impossible_batches_are_refused_at_once(wrong):
    with pytest.raises(DataError):
        batches(5, **{"batch_size": 2, "epochs": 1, "seed": 0, **wrong})
