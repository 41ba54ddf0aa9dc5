"""Copies of rare examples: how many, and what they look like."""

import numpy as np
import pytest
import scipy.ndimage
from PIL import Image

from edge_sdk.affine import ROTATION, SHEAR, SHIFT, ZOOM, affine, random_affine, warp
from edge_sdk.augment import Augmented, augmented
from edge_sdk.data import ArrayDataset, prepare
from edge_sdk.data.labels import histogram, labels_of
from edge_sdk.errors import DataError
from edge_sdk.manifest import Input
from edge_sdk.runtime import Optimiser, Sums
from edge_sdk.training import LocalTraining, train

RNG = np.random.default_rng(0)
BYTES = RNG.integers(0, 256, (6, 9, 12, 3)).astype(np.uint8)
LABELS = np.array([0, 1, 1, 2, 2, 2])
ARRAYS = ArrayDataset(BYTES, LABELS)
MULTIPLES = {0: 3.0, 1: 2.0}
PLAIN = {"shift": (0.0, 0.0), "rotation": 0.0, "shear": 0.0, "zoom": 1.0}


def one(size=(9, 9), **changes):
    values = {name: np.array([value]) for name, value in {**PLAIN, **changes}.items()}
    return affine(**values, size=size)


def moved(dot, size=(9, 9), **changes):
    """Where a bright pixel at ``dot`` is after the transformation."""
    image = np.zeros((1, *size, 1), np.float32)
    image[0, dot[0], dot[1]] = 1
    warped = warp(image, one(size, **changes))[0, :, :, 0]
    return tuple(int(i) for i in np.unravel_index(np.argmax(warped), size))


def add(dataset=ARRAYS, indices=None, multiples=MULTIPLES, classes=3, seed=5, stored=True):
    indices = np.arange(len(dataset)) if indices is None else indices
    return augmented(dataset, indices, multiples=multiples, classes=classes, seed=seed, stored=stored)


def copies_of(result):
    dataset, indices = result
    return [dataset[index][0] for index in indices.tolist() if index >= dataset.originals]


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_warp_is_scipys(dtype):
    images = RNG.integers(0, 256, (20, 11, 16, 3)).astype(dtype)
    matrix, offset = transformation = random_affine([[n] for n in range(20)], (11, 16))
    warped = warp(images, transformation)
    assert warped.dtype == dtype
    for n in range(20):
        for channel in range(3):
            expected = scipy.ndimage.affine_transform(
                images[n, :, :, channel].astype(float), matrix[n], offset[n], order=1, mode="nearest"
            )
            # A value at the middle of two bytes may be rounded either way.
            tolerance = 0.501 if dtype == np.uint8 else 1e-3
            assert np.abs(warped[n, :, :, channel] - expected).max() < tolerance


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_no_transformation_leaves_every_pixel(dtype):
    images = RNG.integers(0, 256, (1, 9, 12, 3)).astype(dtype)
    assert (warp(images, one((9, 12))) == images).all()


def test_a_rotation_is_counter_clockwise_about_the_middle():
    assert moved((4, 7), rotation=90.0) == (1, 4)
    assert moved((1, 4), rotation=45.0) == (2, 2)


def test_a_shift_moves_down_and_to_the_right_by_shares_of_the_sides():
    assert moved((4, 4), size=(10, 20), shift=(0.1, 0.2)) == (5, 8)


def test_a_shear_moves_lower_rows_to_the_right():
    assert moved((7, 4), shear=1.0) == (7, 7)
    assert moved((1, 4), shear=1.0) == (1, 1)


def test_a_zoom_above_one_moves_away_from_the_middle():
    assert moved((3, 5), zoom=2.0) == (2, 6)


def test_beyond_the_edge_the_edge_goes_on():
    image = np.arange(9, dtype=np.float32).reshape(1, 1, 9, 1).repeat(9, axis=1)
    warped = warp(image, one(shift=(0.0, 1 / 3)))
    assert warped[0, 0, :, 0] == pytest.approx([0, 0, 0, 0, 1, 2, 3, 4, 5])


def test_transformations_fill_their_ranges_and_no_more():
    size = (32, 32)
    matrix, offset = random_affine([[n] for n in range(3000)], size)
    # What was drawn, read back from the matrices: rows (cos, sin)/z, columns (-sin - s·cos, cos - s·sin)/z.
    zoom = 1 / np.hypot(*matrix[:, 0].T)
    rotation = np.rad2deg(np.arctan2(matrix[:, 0, 1], matrix[:, 0, 0]))
    shear = -(matrix[:, 1] * matrix[:, 0]).sum(axis=1) * zoom**2
    middle = np.full(2, 15.5)
    shift = (np.linalg.solve(matrix, (middle - offset)[..., None])[..., 0] - middle) / 32
    for values, largest in (
        (shift[:, 0], SHIFT),
        (shift[:, 1], SHIFT),
        (rotation, ROTATION),
        (shear, SHEAR),
        (zoom - 1, ZOOM),
    ):
        assert 0.98 * largest < values.max() < largest * (1 + 1e-9)
        assert 0.98 * largest < -values.min() < largest * (1 + 1e-9)


@pytest.mark.parametrize("stored", [True, False])
def test_whole_multiples_give_their_counts_exactly(stored):
    dataset, indices = add(stored=stored)
    assert histogram(labels_of(dataset, indices, 3), 3).tolist() == [3, 4, 3]


def test_a_fraction_is_one_draw_an_example():
    labels = np.repeat([0, 1], 1000)
    dataset = ArrayDataset(np.zeros((2000, 2, 2), np.uint8), labels)
    result, indices = add(dataset, multiples={0: 2.3, 1: 1.5}, classes=2, stored=False)
    copies = np.bincount(result.sources, minlength=2000)
    assert set(copies[:1000]) == {1, 2}
    assert set(copies[1000:]) == {0, 1}
    # Six standard deviations of the binomial.
    assert abs(copies[:1000].sum() - 1300) < 6 * np.sqrt(1000 * 0.3 * 0.7)
    assert abs(copies[1000:].sum() - 500) < 6 * np.sqrt(1000 * 0.5 * 0.5)
    assert len(indices) == 2000 + copies.sum()


def test_the_originals_keep_their_indices_and_come_first():
    chosen = np.array([4, 0, 2])
    dataset, indices = add(indices=chosen)
    assert indices[:3].tolist() == [4, 0, 2]
    assert all((dataset[i][0] == BYTES[i]).all() and dataset[i][1] == LABELS[i] for i in range(6))


def test_only_chosen_examples_are_copied():
    dataset, _ = add(indices=np.array([1, 5]))
    assert dataset.sources.tolist() == [1]


def test_no_multiple_above_one_gives_the_arguments_back():
    indices = np.arange(6)
    for multiples in ({}, {0: 1.0, 2: 1}):
        dataset, same = add(indices=indices, multiples=multiples)
        assert dataset is ARRAYS
        assert same is indices


def test_a_device_without_the_rare_class_gets_its_arguments_back():
    indices = np.array([3, 4])
    dataset, same = add(indices=indices)
    assert dataset is ARRAYS
    assert same is indices


def test_the_same_seed_gives_the_same_pixels():
    assert all((a == b).all() for a, b in zip(copies_of(add()), copies_of(add()), strict=True))


def test_every_copy_is_another_picture():
    pictures = [image.tobytes() for image in [*BYTES[:3], *copies_of(add()), *copies_of(add(seed=6))]]
    assert len(set(pictures)) == len(pictures) == 3 + 4 + 4


def test_a_copy_does_not_depend_on_the_other_examples():
    alone = copies_of(add(indices=np.array([1])))
    assert (alone[0] == copies_of(add())[2]).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(6, 9, 12), (6, 9, 12, 1), (6, 9, 12, 3), (6, 3, 9, 12)])
def test_stored_and_on_the_fly_arrays_and_single_images_give_the_same_pixels(dtype, shape):
    arrays = ArrayDataset(RNG.integers(0, 256, shape).astype(dtype), LABELS)
    reference = copies_of(add(arrays))
    assert {image.dtype for image in reference} == {np.dtype(dtype)}
    assert {image.shape for image in reference} == {shape[1:]}
    for dataset, stored in ((arrays, False), (list(arrays), True), (list(arrays), False)):
        copies = copies_of(add(dataset, stored=stored))
        assert all((a == b).all() for a, b in zip(reference, copies, strict=True))


def test_more_copies_than_are_warped_at_a_time_are_those_of_single_warps():
    arrays = ArrayDataset(RNG.integers(0, 256, (40, 64, 64, 3)).astype(np.uint8), np.zeros(40, int))
    stored, single = (copies_of(add(arrays, multiples={0: 2.0}, stored=stored)) for stored in (True, False))
    assert all((a == b).all() for a, b in zip(stored, single, strict=True))


def test_channels_first_is_the_same_picture():
    first = ArrayDataset(np.ascontiguousarray(BYTES.transpose(0, 3, 1, 2)), LABELS)
    for a, b in zip(copies_of(add()), copies_of(add(first)), strict=True):
        assert (a.transpose(2, 0, 1) == b).all()


def test_pillow_images_and_lists_are_copied_as_their_pixels():
    grey = BYTES[0, :, :, 0]
    forms = [grey, Image.fromarray(grey), grey.tolist()]
    # Each alone at index 0, so that all draw the same transformation.
    results = [copies_of(add([(form, 0)]))[0] for form in forms]
    assert all(image.dtype == np.uint8 and (image == results[0]).all() for image in results)


def test_a_palette_image_is_copied_as_colours():
    image = Image.new("RGB", (4, 8), (255, 0, 51)).convert("P", palette=Image.Palette.ADAPTIVE)
    copy = copies_of(add([(image, 0)]))[0]
    assert copy.shape == (8, 4, 3)
    assert (copy == [255, 0, 51]).all()


def test_stored_copies_tell_their_bytes():
    assert add()[0].nbytes == add(list(ARRAYS))[0].nbytes == 4 * 9 * 12 * 3


def test_copies_made_on_the_fly_hold_no_bytes():
    assert add(stored=False)[0].nbytes == 0


def test_a_data_set_that_grows_moves_no_copy():
    examples = list(ARRAYS)
    dataset, indices = add(examples, stored=False)
    before = [dataset[index][0] for index in indices.tolist()]
    examples.append((BYTES[0], 0))
    assert all((dataset[i][0] == b).all() for i, b in zip(indices.tolist(), before, strict=True))


def test_labels_are_told_without_making_images():
    class Blind(list):
        def __getitem__(self, index):
            raise AssertionError("an image was opened")

        def label_at(self, index):
            return int(LABELS[index])

    dataset, indices = add(Blind([None] * 6), stored=False)
    assert labels_of(dataset, indices, 3).tolist() == [0, 1, 1, 2, 2, 2, 0, 0, 1, 1]


def test_the_data_set_can_be_iterated_over():
    assert [label for _, label in add()[0]] == [0, 1, 1, 2, 2, 2, 0, 0, 1, 1]


@pytest.mark.parametrize("stored", [True, False])
def test_a_device_trains_on_the_originals_and_the_copies(stored):
    class Counting:
        def train_step(self, x, y, weight, optimiser, noise):
            return Sums(0.0, 0, len(y))

    class Colour:
        input = Input((3, 9, 12), (0.0,) * 3, (1.0,) * 3)
        classes = 3
        noise = ()
        backbone = None

    dataset, indices = add(stored=stored)
    assert isinstance(dataset, Augmented)
    settings = LocalTraining(epochs=2, batch_size=4, optimiser=Optimiser(lr=0.1), seed=0)
    assert train(Counting(), Colour(), dataset, indices, settings).examples == 2 * 10
    images, labels = prepare(dataset, indices, Colour.input, 3)
    np.testing.assert_allclose(images[-1], dataset[9][0].transpose(2, 0, 1) / np.float32(255))
    assert labels[-1] == dataset[9][1] == 1


@pytest.mark.parametrize(
    ("multiples", "message"),
    [
        ({0: 0.5}, "class 0 cannot have 0.5 times"),
        ({0: float("nan")}, "class 0 cannot have nan"),
        ({0: float("inf")}, "class 0 cannot have inf"),
        ({3: 2.0}, "class 3 cannot have 2.0 times its examples: classes are 0 to 2"),
        ({-1: 2.0}, "class -1 cannot"),
        ({0: 1e12}, "augmentation asks for 1e.12 copies, at most"),
    ],
)
def test_bad_multiples_are_refused(multiples, message):
    with pytest.raises(DataError, match=message):
        add(multiples=multiples)


def test_a_negative_seed_is_refused():
    with pytest.raises(DataError, match="seed -1"):
        add(seed=-1)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.full((2, 3), np.nan), "example 0: its image holds NaN"),
        (np.full((2, 3), 1e300), "example 0: its image holds NaN or infinite"),
        (np.full((2, 3), 256), "example 0: integer pixels"),
        ([[1, 2, 3], [4]], "example 0: its image is no array"),
        (np.full((2, 3), "x"), "example 0: pixels are"),
        (np.zeros(3), r"example 0: image has shape \[3\]"),
        (np.zeros((0, 3)), r"example 0: image has shape \[0, 3\]"),
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_a_bad_image_is_named_by_its_originals_index(image, message, stored):
    with pytest.raises(DataError, match=message):
        copies_of(add([(image, 0)], stored=stored))
