"""Calibration as a whole: a real classifier, biased, mended by statistics of devices with skewed labels."""

import numpy as np
import pytest

from edge_sdk.data import ArrayDataset
from edge_sdk.errors import DataError, RunError
from edge_sdk.runtime import Optimiser, open_runtime
from edge_sdk.statistics import class_statistics
from edge_sdk.training import LocalTraining, evaluate, train
from edge_server.calibration import Settings, calibrate, calibrate_on, real_features
from edge_simulation.datasets import load_train_test

DIGITS = (3, 5, 8, 9)  # the four that look most alike
DEVICES = 10
SETTINGS = Settings()


def chosen(dataset):
    kept = np.isin(dataset.labels, DIGITS)
    return ArrayDataset(dataset.images[kept], np.searchsorted(DIGITS, dataset.labels[kept]))


@pytest.fixture(scope="module")
def digits():
    """Training and test images of four classes."""
    data = load_train_test("digits")
    return chosen(data.train), chosen(data.test)


@pytest.fixture(scope="module")
def runtime(cnn, digits):
    """A trained extractor under a classifier whose rows are scaled and shifted."""
    runtime, (training, _) = open_runtime(cnn, threads=1), digits
    local = LocalTraining(epochs=5, batch_size=16, optimiser=Optimiser(lr=0.1), seed=0)
    train(runtime, cnn.manifest, training, np.arange(len(training)), local)
    weights = runtime.get_weights()
    weight, bias = cnn.manifest.head
    weights[weight] = weights[weight] * np.float32([3, 0.3, 1, 0.3])[:, None]
    weights[bias] = weights[bias] + np.float32([1, -1, 2, -1])
    runtime.set_weights(weights)
    return runtime


@pytest.fixture(scope="module")
def biased(runtime):
    return runtime.get_weights()


@pytest.fixture(scope="module")
def reports(cnn, runtime, digits):
    """What ten devices tell, each class divided by Dir(0.1)."""
    (training, _), rng = digits, np.random.default_rng(0)
    shares = [[] for _ in range(DEVICES)]
    for label in range(len(DIGITS)):
        examples = np.flatnonzero(training.labels == label)
        cuts = (rng.dirichlet([0.1] * DEVICES).cumsum()[:-1] * len(examples)).astype(int)
        for share, part in zip(shares, np.split(examples, cuts), strict=True):
            share.extend(part)
    indices = [np.array(share, np.int64) for share in shares]

    def tell(covariance, rank=0):
        return [
            class_statistics(runtime, cnn.manifest, training, own, covariance=covariance, rank=rank)
            for own in indices
        ]

    return {"full": tell("full"), "diagonal": tell("diagonal"), "low_rank": tell("low_rank", 8)}


@pytest.fixture(scope="module")
def accuracy(cnn, digits):
    runtime, (_, test) = open_runtime(cnn, threads=1), digits

    def measure(weights):
        runtime.set_weights(weights)
        return evaluate(runtime, cnn.manifest, test, np.arange(len(test))).correct / len(test)

    return measure


@pytest.fixture(scope="module")
def oracle(cnn, runtime, biased, digits, accuracy):
    """Accuracy after the same re-training on all real features."""
    real = real_features(runtime, cnn.manifest, digits[0])
    return accuracy(calibrate_on(biased, cnn.manifest, *real, SETTINGS))


def test_real_features_mend_the_classifier(biased, accuracy, oracle):
    assert accuracy(biased) < 0.6
    assert oracle > 0.94


@pytest.mark.parametrize(("covariance", "points"), [("full", 2), ("low_rank", 2), ("diagonal", 8)])
def test_statistics_mend_it_like_real_features(cnn, biased, reports, accuracy, oracle, covariance, points):
    mended = calibrate(biased, cnn.manifest, reports[covariance], covariance=covariance, settings=SETTINGS)
    assert accuracy(mended) > oracle - points / 100


def test_only_the_head_changes(cnn, biased, reports):
    mended = calibrate(biased, cnn.manifest, reports["full"], covariance="full", settings=SETTINGS)
    assert {name for name in biased if mended[name] is not biased[name]} == set(cnn.manifest.head)
    assert list(mended) == list(biased)


def test_no_virtual_features_change_nothing(cnn, biased, reports):
    mended = calibrate(
        biased, cnn.manifest, reports["full"], covariance="full", settings=Settings(per_class=0)
    )
    assert all(mended[name].tobytes() == biased[name].tobytes() for name in biased)


def test_calibration_is_deterministic(cnn, biased, reports):
    one, two = (
        calibrate(biased, cnn.manifest, reports["full"], covariance="full", settings=SETTINGS)
        for _ in range(2)
    )
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_without_a_class_told_there_is_no_calibration(cnn, biased, reports):
    silent = [{name: np.zeros_like(array) for name, array in told.items()} for told in reports["full"]]
    with pytest.raises(RunError, match="withheld"):
        calibrate(biased, cnn.manifest, silent, covariance="full", settings=SETTINGS)


def test_real_features_are_those_of_the_runtime(cnn, runtime, digits):
    features, labels = real_features(runtime, cnn.manifest, digits[0])
    images = digits[0].images[:300, None].astype(np.float32) / 255
    np.testing.assert_allclose(features[:300], runtime.embed(images), rtol=1e-4, atol=1e-5)
    assert (labels == digits[0].labels).all()


def test_a_fraction_of_the_real_features_is_drawn_by_seed(cnn, runtime, digits):
    def labels(seed):
        return real_features(runtime, cnn.manifest, digits[0], fraction=0.1, seed=seed)[1].tolist()

    assert len(labels(0)) == round(0.1 * len(digits[0]))
    assert labels(0) == labels(0) != labels(1)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_a_fraction_out_of_its_range_is_refused(cnn, runtime, digits, fraction):
    with pytest.raises(DataError, match="fraction"):
        real_features(runtime, cnn.manifest, digits[0], fraction=fraction)


def test_an_empty_data_set_has_no_features(cnn, runtime):
    empty = ArrayDataset(np.zeros((0, 8, 8), np.uint8), np.zeros(0, int))
    with pytest.raises(DataError, match="empty"):
        real_features(runtime, cnn.manifest, empty)
