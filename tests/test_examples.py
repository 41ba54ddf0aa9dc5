"""What enters the programs where a bundle has a backbone: its features, computed once a task, and checked."""

import msgspec
import numpy as np
import pytest
from quadrants import quadrants

from edge_sdk.data import prepare
from edge_sdk.errors import BundleError, DataError
from edge_sdk.examples import FROZEN_BATCH, Cancelled, enter
from edge_sdk.manifest import Backbone, Input, Pipeline
from edge_sdk.runtime import Optimiser, Sums
from edge_sdk.statistics import class_statistics
from edge_sdk.training import LocalTraining, evaluate, train

COUNT, SEED = 2 * FROZEN_BATCH + 5, 11
DATA, ALL = quadrants(COUNT), np.arange(COUNT)


class Rows:
    """A runtime whose backbone gives the sums of an image's rows, and that keeps what it is given."""

    def __init__(self):
        self.calls, self.seen = [], []

    def backbone(self, images):
        self.calls.append(len(images))
        return images.sum(axis=(1, 3))

    def train_step(self, x, y, *_):
        self.seen.append((x, y))
        return Sums(1.0, 0, len(x))

    def evaluate(self, x, y):
        return self.train_step(x, y)

    def embed(self, x):
        self.seen.append((x, None))
        return np.tile(x, 8)[:, :36]


@pytest.fixture
def manifest(paper):
    backbone = Backbone((8,), {"onnx": "onnx/backbone"})
    return msgspec.structs.replace(paper.manifest, backbone=backbone)


@pytest.fixture
def cropped(manifest):
    """Images larger than the model's: cut out by chance, and mirrored by chance."""
    pipeline = Pipeline((8, 8), flip=True)
    return msgspec.structs.replace(
        manifest,
        input=Input((1, 5, 6), (0.0,), (1.0,), pipeline),
        backbone=Backbone((5,), {"onnx": "onnx/backbone"}),
    )


def trained(manifest, epochs=3, first=0, **options):
    runtime = Rows()
    settings = LocalTraining(epochs, 8, Optimiser(lr=0.1), SEED)
    train(runtime, manifest, DATA, ALL, settings, first=first, **options)
    return runtime


def test_features_are_computed_once_for_all_epochs_in_small_batches(manifest):
    runtime = trained(manifest)
    assert runtime.calls == [FROZEN_BATCH, FROZEN_BATCH, 5]
    assert len(runtime.seen) == 3 * 5


def test_a_step_gets_the_features_and_labels_of_its_own_examples(manifest):
    images, labels = prepare(DATA, ALL, manifest.input, manifest.classes)
    order = np.random.default_rng([SEED, 0]).permutation(COUNT)[:8]
    x, y = trained(manifest).seen[0]
    np.testing.assert_array_equal(x, images.sum(axis=(1, 3))[order])
    np.testing.assert_array_equal(y, labels[order])


def by_label(runtime):
    """The features of all steps, in an order that does not depend on the shuffle."""
    return sorted(row.tobytes() for x, _ in runtime.seen for row in x)


def test_crops_and_flips_are_drawn_once_for_the_round_from_the_tasks_seed(cropped):
    rng = np.random.default_rng([SEED, 0, 3])
    parts = [
        prepare(DATA, ALL[start : start + FROZEN_BATCH], cropped.input, cropped.classes, rng=rng)[0]
        for start in range(0, COUNT, FROZEN_BATCH)
    ]
    expected = sorted(row.tobytes() for row in np.concatenate(parts).sum(axis=(1, 3)))
    assert by_label(trained(cropped, epochs=1)) == expected
    assert by_label(trained(cropped, epochs=2)) == sorted(2 * expected)


def test_training_that_goes_on_half_way_has_the_same_features(cropped):
    whole, rest = trained(cropped, epochs=2), trained(cropped, epochs=2, first=1)
    for (x, _), (again, _) in zip(whole.seen[5:], rest.seen, strict=True):
        np.testing.assert_array_equal(x, again)


def test_cancelling_is_looked_at_between_batches_of_the_backbone(manifest):
    runtime, asked = Rows(), iter([False, False, True])
    with pytest.raises(Cancelled):
        train(
            runtime,
            manifest,
            DATA,
            ALL,
            LocalTraining(1, 8, Optimiser(lr=0.1), 0),
            cancelled=lambda: next(asked),
        )
    assert (runtime.calls, runtime.seen) == ([FROZEN_BATCH, FROZEN_BATCH], [])


def test_evaluation_and_statistics_see_the_features_of_the_middle(cropped):
    images, _ = prepare(DATA, ALL, cropped.input, cropped.classes)
    runtime = Rows()
    evaluate(runtime, cropped, DATA, ALL)
    np.testing.assert_array_equal(runtime.seen[0][0], images.sum(axis=(1, 3)))
    runtime = Rows()
    class_statistics(runtime, cropped, DATA, ALL, covariance="diagonal")
    np.testing.assert_array_equal(
        np.concatenate([x for x, _ in runtime.seen]),
        images.sum(axis=(1, 3))[np.argsort(DATA.labels, kind="stable")],
    )
    assert sum(runtime.calls) == COUNT


def test_an_empty_data_set_is_refused(manifest):
    with pytest.raises(DataError, match="the data set is empty"):
        enter(Rows(), manifest, [], np.arange(0))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (lambda images: np.zeros((len(images), 9), np.float32), r"gives float32 \[16, 9\] for 16 images"),
        (lambda images: np.zeros((1, 8), np.float32), r"gives float32 \[1, 8\] for 16"),
        (lambda images: np.zeros((len(images), 8)), r"gives float64 \[16, 8\].* declares float32 \[16, 8\]"),
        (lambda images: np.full((len(images), 8), np.nan, np.float32), "not finite"),
    ],
)
def test_features_other_than_declared_are_refused_before_a_step(manifest, features, message):
    runtime = Rows()
    runtime.backbone = features
    with pytest.raises(BundleError, match=message):
        train(runtime, manifest, DATA, ALL, LocalTraining(1, 8, Optimiser(lr=0.1), 0))
    assert not runtime.seen
