import gzip
import io
import struct
import sys
import zipfile

import numpy as np
import pytest
from PIL import Image

from edge_sdk.data import ArrayDataset, load, prepare, save_npz
from edge_sdk.errors import DataError
from edge_sdk.manifest import Input

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2], np.uint8)


def idx(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_idx(folder, *, compress=False):
    for prefix, count in (("train", 6), ("t10k", 2)):
        for name, array in (("images-idx3", IMAGES[:count]), ("labels-idx1", LABELS[:count])):
            data = idx(array)
            path = folder / f"{prefix}-{name}-ubyte{'.gz' if compress else ''}"
            path.write_bytes(gzip.compress(data) if compress else data)


@pytest.mark.parametrize("compress", [False, True])
def test_idx_gives_what_was_written(tmp_path, compress):
    write_idx(tmp_path, compress=compress)
    train, test = load(tmp_path), load(tmp_path, split="test")
    assert (train.images == IMAGES).all()
    assert train.labels.tolist() == LABELS.tolist()
    assert len(test) == 2


HOSTILE_IDX = {
    "giant": struct.pack(">HBB3I", 0, 8, 3, 2**31, 2**31, 2**31) + b"x",
    "large": struct.pack(">HBB3I", 0, 8, 3, 60000, 28, 28) + b"x" * 100,
    "truncated": idx(IMAGES)[:-1],
    "longer": idx(IMAGES) + b"x",
    "header": struct.pack(">HBB", 0, 8, 3) + b"\0\0",
    "floats": struct.pack(">HBB1I", 0, 0x0D, 1, 1) + b"\0" * 4,
    "dimensions": struct.pack(">HBB", 0, 8, 255) + b"\0\0\0\1" * 255,
    "empty": b"",
    "text": b"<html>not found</html>",
}


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", HOSTILE_IDX)
def test_a_hostile_idx_file_is_refused(tmp_path, name, compress):
    write_idx(tmp_path, compress=compress)
    path = next(tmp_path.glob("train-images*"))
    path.write_bytes(gzip.compress(HOSTILE_IDX[name]) if compress else HOSTILE_IDX[name])
    with pytest.raises(DataError, match="train-images"):
        load(tmp_path)


def test_a_truncated_gzip_is_refused(tmp_path):
    write_idx(tmp_path, compress=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path)


def cifar(labels, *, coarse=False):
    pixels = np.random.default_rng(1).integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
    heads = [bytes([0, label]) if coarse else bytes([label]) for label in labels]
    return b"".join(head + image.tobytes() for head, image in zip(heads, pixels, strict=True)), pixels


def test_cifar10_is_read_channels_last(tmp_path):
    data, pixels = cifar([3, 9])
    (tmp_path / "data_batch_1.bin").write_bytes(data)
    (tmp_path / "data_batch_2.bin").write_bytes(data)
    (tmp_path / "test_batch.bin").write_bytes(data)
    dataset = load(tmp_path)
    assert dataset.labels.tolist() == [3, 9, 3, 9]
    assert (dataset.images[1] == pixels[1].transpose(1, 2, 0)).all()
    assert len(load(tmp_path, split="test")) == 2


def test_cifar100_gives_the_fine_label(tmp_path):
    data, pixels = cifar([42, 99], coarse=True)
    (tmp_path / "train.bin").write_bytes(data)
    dataset = load(tmp_path)
    assert dataset.labels.tolist() == [42, 99]
    assert (dataset.images[1] == pixels[1].transpose(1, 2, 0)).all()
    with pytest.raises(DataError, match=r"test\.bin"):
        load(tmp_path, split="test")


@pytest.mark.parametrize("data", [cifar([1, 2])[0][:-1], b"", cifar([10])[0]])
def test_a_truncated_or_mislabelled_cifar_is_refused(tmp_path, data):
    (tmp_path / "data_batch_1.bin").write_bytes(data)
    with pytest.raises(DataError, match="data_batch_1"):
        load(tmp_path)


@pytest.mark.parametrize(
    "data", [cifar([1], coarse=True)[0][:-1], cifar([1, 2])[0], cifar([100], coarse=True)[0]]
)
def test_a_truncated_or_mislabelled_cifar100_is_refused(tmp_path, data):
    (tmp_path / "train.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"train\.bin"):
        load(tmp_path)


def write_folders(folder):
    for name, colour in (("dog", (255, 0, 0)), ("cat", (0, 0, 255))):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 6), colour).save(folder / name / "one.png")
        (folder / name / "notes.txt").write_text("no image")


def test_class_folders_are_sorted_and_images_fit_the_input(tmp_path):
    write_folders(tmp_path)
    dataset = load(tmp_path, input=Input((3, 2, 4), (0, 0, 0), (1, 1, 1)))
    assert dataset.class_names == ("cat", "dog")
    images, labels = prepare(dataset, np.arange(2), Input((3, 2, 4), (0, 0, 0), (1, 1, 1)), 2)
    assert labels.tolist() == [0, 1]
    assert images[1, :, 0, 0].tolist() == [1, 0, 0]
    assert load(tmp_path, input=Input((1, 3, 3), (0,), (1,)))[0][0].shape == (3, 3)
    assert load(tmp_path)[0][0].shape == (6, 8, 3)


def test_train_and_test_folders_are_splits(tmp_path):
    write_folders(tmp_path / "train")
    write_folders(tmp_path / "test")
    assert "test" in load(tmp_path, split="test").paths[0].parts


def test_a_broken_image_is_named(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "cat" / "two.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    with pytest.raises(DataError, match=r"example 1: .*two\.png"):
        load(tmp_path)[1]


def test_missing_pillow_names_the_extra(tmp_path, monkeypatch):
    write_folders(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"edge-sdk-fl\[images\]"):
        load(tmp_path)


def test_npz_gives_what_was_saved_and_the_same_bytes(tmp_path):
    for name in ("a.npz", "b.npz"):
        save_npz(tmp_path / name, ArrayDataset(IMAGES, LABELS))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    dataset = load(tmp_path / "a.npz")
    assert (dataset.images == IMAGES).all()
    assert dataset.labels.tolist() == LABELS.tolist()
    save_npz(tmp_path / "c.npz", list(dataset))
    assert (load(tmp_path / "c.npz").images == IMAGES).all()


def test_examples_of_different_shapes_are_not_saved(tmp_path):
    with pytest.raises(DataError, match="example 1"):
        save_npz(tmp_path / "a.npz", [(np.zeros((2, 2)), 0), (np.zeros((2, 3)), 0)])
    assert not list(tmp_path.iterdir())


def giant_npy():
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 28, 28)}
    )
    return header.getvalue()


def npz_of(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


HOSTILE_NPZ = {
    "pickle": npz_of(images=npy(np.array([{}], object)), labels=npy(LABELS)),
    "giant": npz_of(images=giant_npy(), labels=npy(LABELS)),
    "truncated": npz_of(images=npy(IMAGES)[:-3], labels=npy(LABELS)),
    "no npy": npz_of(images=b"hello", labels=npy(LABELS)),
    "no labels": npz_of(images=npy(IMAGES)),
    "float labels": npz_of(images=npy(IMAGES), labels=npy(LABELS.astype(float))),
    "not a zip": b"PK but not really",
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE_NPZ)
def test_a_hostile_npz_is_refused(tmp_path, name):
    path = tmp_path / "share.npz"
    path.write_bytes(HOSTILE_NPZ[name])
    with pytest.raises(DataError, match="share"):
        load(path)


def test_an_unknown_layout_lists_those_there_are(tmp_path):
    (tmp_path / "readme.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "readme.txt"):
        with pytest.raises(DataError, match=r"npz.*IDX.*CIFAR.*sub-folder"):
            load(path)


def test_a_layout_of_one_part_is_read_as_either_split(tmp_path):
    save_npz(tmp_path / "a.npz", ArrayDataset(IMAGES, LABELS))
    assert len(load(tmp_path / "a.npz", split="test")) == len(load(tmp_path / "a.npz")) == len(LABELS)


def test_an_unknown_split_names_those_there_are(tmp_path):
    with pytest.raises(DataError, match="'train' or 'test'"):
        load(tmp_path / "a.npz", split="validation")


def test_an_image_that_claims_more_pixels_than_it_has_bytes_for_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "one.pgm").write_bytes(b"P5 7 2771273 255\n" + bytes(3000))
    with pytest.raises(DataError, match="7 x 2771273 pixels are over the limit"):
        load(tmp_path)[0]
