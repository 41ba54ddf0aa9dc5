"""Crops, flips and standardised images; the oracle is a loop over images in plain numpy."""

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_sdk.bundle import Bundle
from edge_sdk.cli import main
from edge_sdk.data import ArrayDataset, load, prepare
from edge_sdk.errors import BundleError, DataError
from edge_sdk.manifest import Input, Pipeline
from edge_sdk.runtime import Optimiser, Sums
from edge_sdk.training import LocalTraining, evaluate, train

CROP = Input((3, 4, 5), (0.1, 0.2, 0.3), (0.5, 1.0, 2.0), Pipeline((9, 8)))


def with_pipeline(**changes: bool) -> Input:
    return msgspec.structs.replace(CROP, pipeline=Pipeline((9, 8), **changes))


def images(count: int, seed: int = 0) -> ArrayDataset:
    rng = np.random.default_rng(seed)
    return ArrayDataset(rng.integers(0, 256, (count, 9, 8, 3)).astype(np.uint8), np.arange(count))


def whole(dataset: ArrayDataset) -> np.ndarray:
    """Every image whole, channels first, normalised."""
    channels = dataset.images.transpose(0, 3, 1, 2) / 255
    return (channels - np.reshape(CROP.mean, (3, 1, 1))) / np.reshape(CROP.std, (3, 1, 1))


def crops(image: np.ndarray, flip: bool) -> list[np.ndarray]:
    """Every crop of one image, and its mirror image where there is a flip."""
    cut = [image[:, top : top + 4, left : left + 5] for top in range(6) for left in range(4)]
    return cut + [crop[..., ::-1] for crop in cut] * flip


@pytest.mark.parametrize("size", [(9, 8), (5, 6), (4, 5)])
def test_without_a_generator_the_middle_is_cut_out(size):
    rng = np.random.default_rng(0)
    dataset = ArrayDataset(rng.random((2, *size, 3), np.float32), np.zeros(2, int))
    input = Input((3, 4, 5), (0.0,) * 3, (1.0,) * 3, Pipeline(size, flip=True))
    found, _ = prepare(dataset, np.arange(2), input, 1)
    top, left = {(9, 8): (2, 1), (5, 6): (0, 0), (4, 5): (0, 0)}[size]
    expected = dataset.images.transpose(0, 3, 1, 2)[:, :, top : top + 4, left : left + 5]
    assert found.flags.c_contiguous
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("flip", [False, True])
def test_a_crop_is_one_of_those_that_there_are_and_all_of_them_come_up(flip):
    dataset = images(1)
    indices = np.zeros(2000, np.int64)
    found, _ = prepare(dataset, indices, with_pipeline(flip=flip), 1, rng=np.random.default_rng(1))
    possible = crops(whole(dataset)[0], flip)
    distances = np.stack([np.abs(found - crop).max(axis=(1, 2, 3)) for crop in possible])
    assert (distances.min(axis=0) < 1e-5).all()
    times = np.bincount(distances.argmin(axis=0), minlength=len(possible))
    # Of 2000 draws among 24 or 48, each comes up 83 or 42 times: six deviations to each side.
    expected = 2000 / len(possible)
    assert (np.abs(times - expected) < 6 * np.sqrt(expected)).all()


def test_an_image_without_left_and_right_of_its_own_is_mirrored_about_half_the_time():
    dataset = ArrayDataset(np.array([[[0, 255]]], np.uint8), np.array([0]))
    input = Input((1, 1, 2), (0.0,), (1.0,), Pipeline((1, 2), flip=True))
    found, _ = prepare(dataset, np.zeros(4000, np.int64), input, 1, rng=np.random.default_rng(2))
    assert abs(found[:, 0, 0, 0].mean() - 0.5) < 0.05


def test_images_are_standardised_one_by_one_after_the_crop():
    dataset = images(6)
    found, _ = prepare(dataset, np.arange(6), with_pipeline(standardise=True), 6)
    for image, uncut in zip(found, whole(dataset), strict=True):
        crop = uncut[:, 2:6, 1:6]
        np.testing.assert_allclose(image, (crop - crop.mean()) / crop.std(), rtol=1e-4, atol=1e-5)


def test_a_deviation_below_one_over_the_root_of_the_pixels_is_taken_for_that():
    faint = np.full((2, 4, 5, 3), 0.25, np.float32)
    faint[1, 0, 0, 0] += 0.001
    plain = Input((3, 4, 5), (0.0,) * 3, (1.0,) * 3, Pipeline((4, 5), standardise=True))
    found, _ = prepare(ArrayDataset(faint, np.zeros(2, int)), np.arange(2), plain, 1)
    assert (found[0] == 0).all()
    expected = (faint[1].transpose(2, 0, 1) - faint[1].mean()) * np.sqrt(60)
    np.testing.assert_allclose(found[1], expected, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_pixels_near_the_largest_float_stay_finite():
    huge = np.full((1, 4, 5, 3), np.finfo(np.float32).max, np.float32)
    huge[0, :2] *= -1
    plain = Input((3, 4, 5), (0.0,) * 3, (1.0,) * 3, Pipeline((4, 5), standardise=True))
    found, _ = prepare(ArrayDataset(huge, np.zeros(1, int)), np.arange(1), plain, 1)
    assert np.abs(found).max() == pytest.approx(1)


@pytest.mark.parametrize("layout", [(0, 1, 2, 3), (0, 3, 1, 2)])
def test_the_fast_path_gives_the_bits_of_the_slow_one(layout):
    dataset = ArrayDataset(images(5).images.transpose(layout), np.arange(5))
    input, indices = with_pipeline(flip=True, standardise=True), np.array([4, 0, 0, 2])
    before = dataset.images.copy()
    fast, slow = (
        prepare(source, indices, input, 5, rng=np.random.default_rng(3))[0]
        for source in (dataset, list(dataset))
    )
    assert fast.shape == (4, 3, 4, 5)
    assert fast.tobytes() == slow.tobytes()
    assert (dataset.images == before).all()


def test_an_image_of_the_models_own_size_is_not_one_of_the_data_sets():
    with pytest.raises(DataError, match=r"shape \[4, 5, 3\], expected \[9, 8, 3\]"):
        prepare([(np.zeros((4, 5, 3)), 0)], np.array([0]), CROP, 1)


def test_image_files_are_resized_to_the_size_before_the_crop(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (20, 30)).save(tmp_path / name / "0.png")
    assert load(tmp_path, input=CROP)[0][0].shape == (9, 8, 3)


class Recorder:
    """A runtime that keeps the batches it is given."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def train_step(self, x, y, *_) -> Sums:
        self.seen.append(x.tobytes() + y.tobytes())
        return Sums(1.0, 0, len(x))

    def evaluate(self, x, y) -> Sums:
        return self.train_step(x, y)


def batches_of(manifest, seed: int) -> list[bytes]:
    recorder = Recorder()
    optimiser = Optimiser(lr=0.1)
    train(recorder, manifest, images_of_one_channel(9), np.arange(9), LocalTraining(3, 4, optimiser, seed))
    return recorder.seen


@pytest.fixture
def cropped(paper):
    """A manifest whose images are larger than the model's."""
    pipeline = Pipeline((9, 8), flip=True)
    return msgspec.structs.replace(paper.manifest, input=Input((1, 8, 8), (0.0,), (1.0,), pipeline))


def test_training_repeats_its_crops_by_the_seed(cropped):
    assert batches_of(cropped, 7) == batches_of(cropped, 7)
    assert batches_of(cropped, 7) != batches_of(cropped, 8)


def test_an_image_is_cut_anew_in_every_epoch(cropped):
    recorder = Recorder()
    settings = LocalTraining(6, 1, Optimiser(lr=0.1), 0)
    train(recorder, cropped, images_of_one_channel(1), np.arange(1), settings)
    assert len(set(recorder.seen)) > 1


def test_evaluation_cuts_out_the_middle_every_time(cropped):
    recorder = Recorder()
    for _ in range(3):
        evaluate(recorder, cropped, images_of_one_channel(4), np.arange(4))
    assert len(set(recorder.seen)) == 1


def images_of_one_channel(count: int) -> ArrayDataset:
    return ArrayDataset(images(count).images[..., 0], np.zeros(count, int))


def written(paper, input: object) -> Bundle:
    members = {name: paper.member(name) for name in paper.manifest.members if name.startswith("onnx")}
    return Bundle.build(msgspec.structs.replace(paper.manifest, input=input), paper.weights, members)


def test_the_manifest_keeps_the_pipeline(paper, cropped):
    assert Bundle.read(written(paper, cropped.input).data).manifest.input == cropped.input


def test_a_bundle_without_a_pipeline_does_not_mention_it(paper):
    assert b"pipeline" not in paper.member("manifest.json")


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (Pipeline((7, 8)), r"cuts \[8, 8\] pixels out of images of \[7, 8\]"),
        (Pipeline((8, 0)), r"cuts \[8, 8\] pixels out of images of \[8, 0\]"),
        (Pipeline((1 << 31, 1 << 31)), "over the limit"),
        (Pipeline((1 << 32, 8)), "not valid"),
        (Pipeline((-9, 8)), "not valid"),
        (Pipeline((9, 8, 3)), "not valid"),
        (Pipeline((9, 8), flip=0.5), "not valid"),
        ({"size": [9, 8], "rotate": True}, "rotate"),
        ({"flip": True}, "size"),
    ],
)
def test_an_impossible_pipeline_is_refused(paper, pipeline, message):
    with pytest.raises(BundleError, match=message):
        written(paper, Input((1, 8, 8), (0.0,), (1.0,), pipeline))


@pytest.mark.parametrize(
    ("pipeline", "line"),
    [
        (None, "none"),
        (Pipeline((9, 8), flip=True, standardise=True), "crop from 9x8, flip, standardise"),
        (Pipeline((8, 8), standardise=True), "standardise"),
    ],
)
def test_inspect_says_what_the_pipeline_does(paper, tmp_path, capsys, pipeline, line):
    written(paper, Input((1, 8, 8), (0.0,), (1.0,), pipeline)).write(tmp_path / "m.edge")
    assert main(["inspect", str(tmp_path / "m.edge")]) == 0
    (found,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("pipeline")]
    assert found.split(maxsplit=1)[1] == line
