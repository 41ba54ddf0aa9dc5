import gzip
import struct
import sys
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from edge_sdk.data import ArrayDataset, prepare, save_npz
from edge_sdk.errors import DataError
from edge_sdk.manifest import Input
from edge_simulation.datasets import load_train_test
from edge_simulation.partition import natural

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


def write_cifar100(folder):
    folder.mkdir(exist_ok=True)
    for name, count in (("train.bin", 4), ("test.bin", 2)):
        (folder / name).write_bytes((bytes([3, 77]) + bytes(3072)) * count)


@pytest.mark.parametrize("place", [".", "cifar-100-binary"])
def test_cifar100_is_found_below_the_data_folder_and_gives_fine_labels(tmp_path, place):
    write_cifar100(tmp_path / place)
    data = load_train_test("cifar100", data_dir=tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (4, 2, 100)
    assert data.train.labels.tolist() == [77] * 4
    assert data.class_names[77] == "77"


def test_cifar100_takes_its_class_names_from_the_file_beside_it(tmp_path):
    write_cifar100(tmp_path)
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"kind_{k}" for k in range(100)) + "\n")
    assert load_train_test("cifar100", data_dir=tmp_path).class_names[99] == "kind_99"


def test_one_cifar_is_not_taken_for_the_other(tmp_path):
    write_cifar100(tmp_path)
    with pytest.raises(DataError, match=r"no CIFAR-10:.*data_batch_1"):
        load_train_test("cifar10", data_dir=tmp_path)


def test_missing_cifar100_says_where_to_get_it(tmp_path):
    with pytest.raises(DataError, match=r"--data-dir.*cifar-100-binary"):
        load_train_test("cifar100", data_dir=tmp_path)


LENGTHS = (500, 260, 1000, 100)


@pytest.fixture
def watch(monkeypatch):
    """A stand-in for seglearn with the interface of its release 1.2.5, and what it gives."""
    generator = np.random.default_rng(0)
    scales = np.array([1, 2, 3, 4, 5, 1000.0])
    given = {
        "X": [generator.normal(scales, scales, (length, 6)) for length in LENGTHS],
        "y": np.array([2, 0, 1, 1]),
        "subject": np.array([7, 3, 7, 3]),
        "side": np.array([1.0, 0.0, 1.0, 0.0]),
        "X_labels": ["ax", "ay", "az", "wx", "wy", "wz"],
        "y_labels": ["PEN", "ABD", "FEL"],
    }
    package, module = ModuleType("seglearn"), ModuleType("seglearn.datasets")
    module.load_watch = lambda: given
    monkeypatch.setitem(sys.modules, "seglearn", package)
    monkeypatch.setitem(sys.modules, "seglearn.datasets", module)
    return given


def test_windows_of_a_recording_are_pictures_of_six_channels(watch):
    data = load_train_test("smartwatch")
    assert (data.train.images.shape[1:], data.train.images.dtype) == ((1, 100, 6), np.float32)
    assert (data.input_shape, data.classes, data.class_names) == ((6, 1, 100), 3, ("PEN", "ABD", "FEL"))
    images, _ = prepare(data.train, np.arange(2), Input((6, 1, 100), (0,) * 6, (1,) * 6), 3)
    assert (images[1, 4, 0] == data.train.images[1, 0, :, 4]).all()


def test_the_last_fifth_of_each_recording_is_the_test(watch):
    data = load_train_test("smartwatch")
    before = [recording[: len(recording) * 4 // 5] for recording in watch["X"]]
    mean, deviation = np.concatenate(before).mean(axis=0), np.concatenate(before).std(axis=0)
    expected = [
        (part[start : start + 100] - mean) / deviation
        for recording in watch["X"]
        for part, step in ((recording[len(recording) * 4 // 5 :], 100),)
        for start in range(0, len(part) - 99, step)
    ]
    assert np.allclose(data.test.images[:, 0], expected, atol=1e-5)
    assert data.test.labels.tolist() == [2, 1, 1]


def test_training_windows_overlap_by_half_and_end_before_the_test(watch):
    data = load_train_test("smartwatch")
    # 400, 208, 800 and 80 samples: the last recording is too short for a window.
    assert data.train.labels.tolist() == [2] * 7 + [0] * 3 + [1] * 15
    assert (data.train.images[0, 0, 50:] == data.train.images[1, 0, :50]).all()


def test_people_divide_the_smartwatch_by_themselves(watch):
    data = load_train_test("smartwatch")
    fleet = natural(data.people)
    assert [data.people[part].tolist() for part in fleet.indices] == [[3] * 3, [7] * 22]
    assert fleet.histogram(data.train.labels, 3).tolist() == [[3, 0, 0], [0, 15, 7]]


def test_missing_seglearn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "seglearn", None)
    with pytest.raises(DataError, match=r"edge-sdk-fl\[smartwatch\]"):
        load_train_test("smartwatch")


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
