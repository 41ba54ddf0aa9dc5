import gzip
import struct

import numpy as np
import pytest
from PIL import Image

from edge_sdk.data import ArrayDataset, save_npz
from edge_sdk.errors import DataError
from edge_simulation.datasets import load_train_test

LABELS = np.repeat(np.arange(3), 20)


def images(count, side=5):
    return np.random.default_rng(0).integers(0, 256, (count, side, side), dtype=np.uint8)


def write_idx(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", 40), ("t10k", 10)):
        for name, array in (("images-idx3", images(count)), ("labels-idx1", np.arange(count) % 10)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            path = folder / f"{prefix}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


def write_images(folder, count=10, size=(64, 32)):
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            Image.new("RGB", size, (200 * number, k, 0)).save(folder / name / f"{k}.png")


def test_digits_hold_out_360_images_of_every_class():
    data = load_train_test("digits")
    assert (len(data.train), len(data.test), data.classes) == (1437, 360, 10)
    assert data.input_shape == (1, 8, 8)
    assert (data.train.images.dtype, data.train.images.max()) == (np.uint8, 255)
    assert np.ptp(np.bincount(data.test.labels)) <= 2


def test_digits_follow_the_seed():
    first, again, other = (load_train_test("digits", seed=seed) for seed in (1, 1, 2))
    assert (first.test.images == again.test.images).all()
    assert (first.test.images != other.test.images).any()


def test_no_digit_is_in_both_parts():
    data = load_train_test("digits")
    whole = np.concatenate([data.train.images, data.test.images]).reshape(1797, -1)
    from sklearn.datasets import load_digits

    expected = np.round(load_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, whole)) == sorted(map(bytes, expected))


@pytest.mark.parametrize("place", [".", "fashion-mnist"])
def test_fashion_mnist_is_found_below_the_data_folder(tmp_path, place):
    write_idx(tmp_path / place)
    data = load_train_test("fashion-mnist", data_dir=tmp_path)
    assert (len(data.train), len(data.test), data.class_names[9]) == (40, 10, "ankle boot")


def test_missing_fashion_mnist_says_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"dataset-fashion-mnist.*--data-dir"):
        load_train_test("fashion-mnist", data_dir=tmp_path)


@pytest.mark.parametrize("place", [".", "cifar-10-batches-bin"])
def test_cifar10_is_found_below_the_data_folder(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    for name, count in (("data_batch_1.bin", 4), ("test_batch.bin", 2)):
        (tmp_path / place / name).write_bytes((bytes([1]) + bytes(3072)) * count)
    data = load_train_test("cifar10", data_dir=tmp_path)
    assert (len(data.train), len(data.test), data.input_shape) == (4, 2, (3, 32, 32))


@pytest.mark.parametrize("missing", [{}, {"data_dir": "/nowhere"}])
def test_missing_cifar10_says_where_to_get_it(missing):
    with pytest.raises(DataError, match=r"--data-dir.*cifar-10-binary"):
        load_train_test("cifar10", **missing)


def test_ones_own_idx_folder(tmp_path):
    write_idx(tmp_path)
    data = load_train_test(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (40, 10, 10)


def test_a_fifth_of_each_class_of_an_npz_is_held_out(tmp_path):
    save_npz(tmp_path / "leaves.npz", ArrayDataset(images(60), LABELS))
    data = load_train_test(tmp_path / "leaves.npz", seed=3)
    assert np.bincount(data.test.labels).tolist() == [4, 4, 4]
    assert np.bincount(data.train.labels).tolist() == [16, 16, 16]
    assert (data.name, data.class_names) == ("leaves", ("0", "1", "2"))


def test_image_folders_are_split_and_shrunk_to_32_pixels(tmp_path):
    write_images(tmp_path)
    data = load_train_test(tmp_path)
    assert data.class_names == ("cat", "dog")
    assert (len(data.train), len(data.test), data.input_shape) == (16, 4, (3, 16, 32))


def test_small_images_keep_the_size_of_the_first(tmp_path):
    write_images(tmp_path, size=(7, 9))
    Image.new("RGB", (20, 20)).save(tmp_path / "dog" / "large.png")
    assert load_train_test(tmp_path).input_shape == (3, 9, 7)


def test_train_and_test_folders_are_used_when_there(tmp_path):
    write_images(tmp_path / "train", count=6)
    write_images(tmp_path / "test", count=3)
    data = load_train_test(tmp_path)
    assert (len(data.train), len(data.test)) == (12, 6)
    (tmp_path / "test" / "bird").mkdir()
    with pytest.raises(DataError, match="same names"):
        load_train_test(tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.zeros(60, int), "one class"),
        (LABELS - 1, "number the classes from 0"),
        (LABELS * 10**9, "number the classes from 0"),
    ],
)
def test_labels_must_number_the_classes(tmp_path, labels, message):
    save_npz(tmp_path / "a.npz", ArrayDataset(images(60), labels))
    with pytest.raises(DataError, match=message):
        load_train_test(tmp_path / "a.npz")


def test_too_few_images_to_hold_out_are_refused(tmp_path):
    save_npz(tmp_path / "a.npz", ArrayDataset(images(1), np.zeros(1, int)))
    with pytest.raises(DataError, match="too few"):
        load_train_test(tmp_path / "a.npz")


def test_an_unknown_name_lists_those_there_are(tmp_path):
    with pytest.raises(DataError, match="digits, fashion-mnist, cifar10"):
        load_train_test("imagenet")
    with pytest.raises(DataError, match="unknown layout"):
        load_train_test(tmp_path)
