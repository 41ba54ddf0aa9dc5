"""A device's class statistics, against numpy.cov and torch; and what the server does not believe."""

import msgspec
import numpy as np
import pytest
import torch

from edge_sdk.data import ArrayDataset
from edge_sdk.errors import TensorError
from edge_sdk.examples import EVALUATION_BATCH, Cancelled
from edge_sdk.manifest import Input
from edge_sdk.runtime import open_runtime
from edge_sdk.statistics import (
    check_statistics,
    class_statistics,
    packed,
    statistics_nbytes,
    statistics_specs,
    unpacked,
)
from edge_sdk.tensors import check, decode, encode

FEATURES, CLASSES = 36, 4
KINDS = [("full", 0), ("diagonal", 0), ("low_rank", 3)]


class Pixels:
    """A runtime whose features are the image's pixels."""

    def __init__(self):
        self.batches = []

    def embed(self, x):
        self.batches.append(len(x))
        return x.reshape(len(x), -1)


@pytest.fixture(scope="module")
def manifest(paper):
    return msgspec.structs.replace(paper.manifest, input=Input((1, 6, 6), (0.0,), (1.0,)))


def correlated(labels, seed=0, offset=0.0, scale=1.0):
    """A data set whose features are correlated, float32."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((FEATURES, FEATURES))
    x = offset + scale * rng.standard_normal((len(labels), FEATURES)) @ mixing
    return ArrayDataset(x.astype(np.float32).reshape(-1, 6, 6), np.asarray(labels))


def features_of(dataset, label):
    return dataset.images[dataset.labels == label].reshape(-1, FEATURES).astype(np.float64)


def statistics(manifest, dataset, covariance="full", runtime=None, **options):
    indices = options.pop("indices", np.arange(len(dataset)))
    return class_statistics(runtime or Pixels(), manifest, dataset, indices, covariance=covariance, **options)


LABELS = np.random.default_rng(5).permutation(np.repeat([0, 1, 3], [700, 20, 1]))


def test_counts_are_those_of_the_labels(manifest):
    assert statistics(manifest, correlated(LABELS))["count"].tolist() == [700, 20, 0, 1]


def test_means_are_those_of_the_features(manifest):
    data = correlated(LABELS)
    means = statistics(manifest, data)["mean"]
    for label in (0, 1, 3):
        np.testing.assert_allclose(means[label], features_of(data, label).mean(axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("label", [0, 1])
def test_a_scatter_is_the_covariance_times_n_less_1(manifest, label):
    data = correlated(LABELS)
    scatter = unpacked(statistics(manifest, data)["scatter"][label], FEATURES)
    x = features_of(data, label)
    np.testing.assert_allclose(scatter, np.cov(x.T) * (len(x) - 1), rtol=1e-10, atol=1e-8)


def test_a_diagonal_holds_the_variances(manifest):
    data = correlated(LABELS)
    x = features_of(data, 0)
    scatter = statistics(manifest, data, "diagonal")["scatter"][0]
    np.testing.assert_allclose(scatter, x.var(axis=0) * len(x), rtol=1e-10)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_a_mean_far_from_zero_costs_no_digits(manifest, covariance):
    data = correlated(np.zeros(2000, int), offset=1e6)
    x = features_of(data, 0)
    scatter = statistics(manifest, data, covariance)["scatter"][0]
    variances = np.diag(unpacked(scatter, FEATURES)) if covariance == "full" else scatter
    np.testing.assert_allclose(variances, x.var(axis=0) * len(x), rtol=1e-10)


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_one_sample_has_a_mean_and_no_scatter(manifest, covariance, rank):
    data = correlated(LABELS)
    told = statistics(manifest, data, covariance, rank=rank)
    assert (told["mean"][3] == features_of(data, 3)[0]).all()
    assert not any(told[name][3].any() for name in told if name in ("scatter", "factor"))


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_a_withheld_class_is_all_zero(manifest, covariance, rank):
    told = statistics(manifest, correlated(LABELS), covariance, rank=rank, withhold_below=21)
    assert told["count"].tolist() == [700, 0, 0, 0]
    assert not any(tensor[1:].any() for tensor in told.values())


def test_a_withheld_class_is_not_even_looked_at(manifest):
    runtime = Pixels()
    statistics(manifest, correlated(LABELS), runtime=runtime, withhold_below=21)
    assert sum(runtime.batches) == 700


def test_only_the_chosen_examples_count(manifest):
    data = correlated(LABELS)
    told = statistics(manifest, data, indices=np.flatnonzero(LABELS == 1)[:7])
    assert told["count"].tolist() == [0, 7, 0, 0]
    np.testing.assert_allclose(told["mean"][1], features_of(data, 1)[:7].mean(axis=0), atol=1e-12)


def test_features_are_taken_a_batch_at_a_time(manifest):
    runtime = Pixels()
    statistics(manifest, correlated(LABELS), runtime=runtime)
    assert (sum(runtime.batches), max(runtime.batches)) == (len(LABELS), EVALUATION_BATCH)


def test_features_are_the_penultimate_ones_in_evaluation_mode(norm, norm_model):
    images = np.random.default_rng(0).random((60, 8, 8)).astype(np.float32)
    data = ArrayDataset(images, np.zeros(60, int))
    weights = {name: tensor + tensor.dtype.type(1) for name, tensor in norm.weights.items()}
    runtime = open_runtime(norm, threads=1)
    runtime.set_weights(weights)
    told = class_statistics(runtime, norm.manifest, data, np.arange(60), covariance="full")
    model = type(norm_model)().eval()
    model.load_state_dict({name: torch.tensor(tensor) for name, tensor in weights.items()})
    with torch.no_grad():
        x = torch.relu(model.norm(model.conv(torch.tensor(images[:, None])))).flatten(1).double().numpy()
    np.testing.assert_allclose(told["mean"][0], x.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(unpacked(told["scatter"][0], 36), np.cov(x.T) * 59, rtol=1e-3, atol=1e-4)


def test_low_rank_is_the_best_of_its_rank(manifest):
    data = correlated(np.zeros(500, int))
    factor = statistics(manifest, data, "low_rank", rank=3)["factor"][0]
    x = features_of(data, 0)
    _, singular, right = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    best = (right[:3].T * singular[:3] ** 2) @ right[:3]
    np.testing.assert_allclose(factor.T @ factor, best, atol=1e-9 * singular[0] ** 2)


def test_low_rank_has_the_exact_diagonal(manifest):
    data = correlated(np.zeros(500, int))
    told = statistics(manifest, data, "low_rank", rank=3)
    x = features_of(data, 0)
    diagonal = (told["factor"][0] ** 2).sum(axis=0) + told["scatter"][0]
    np.testing.assert_allclose(diagonal, x.var(axis=0) * 500, rtol=1e-10)


def test_cancelling_stops_before_the_next_batch(manifest):
    runtime = Pixels()
    with pytest.raises(Cancelled):
        statistics(manifest, correlated(LABELS), runtime=runtime, cancelled=lambda: len(runtime.batches) == 2)
    assert len(runtime.batches) == 2


def test_a_model_that_has_diverged_is_said_to(manifest):
    class Diverged(Pixels):
        def embed(self, x):
            return np.full((len(x), FEATURES), np.nan, np.float32)

    with pytest.raises(TensorError, match="diverged"):
        statistics(manifest, correlated(LABELS), runtime=Diverged())


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_what_is_sent_is_what_is_declared(manifest, covariance, rank):
    told = statistics(manifest, correlated(LABELS), covariance, rank=rank)
    check(told, statistics_specs(CLASSES, FEATURES, covariance, rank))
    assert sum(a.nbytes for a in told.values()) == statistics_nbytes(CLASSES, FEATURES, covariance, rank)


@pytest.mark.parametrize(
    ("covariance", "rank", "megabytes"),
    [("full", 0, 6.569), ("diagonal", 0, 0.0205), ("low_rank", 16, 0.184)],
)
def test_bytes_of_a_class_of_mobilenet(covariance, rank, megabytes):
    assert statistics_nbytes(1, 1280, covariance, rank) / 1e6 == pytest.approx(megabytes, rel=2e-3)


@pytest.mark.parametrize(
    ("covariance", "rank"),
    [("full", 1), ("diagonal", 1), ("low_rank", 0), ("low_rank", 37), ("low_rank", -1)],
)
def test_a_rank_that_does_not_fit_is_refused(covariance, rank):
    with pytest.raises(TensorError, match="rank"):
        statistics_specs(CLASSES, FEATURES, covariance, rank)


def test_a_triangle_is_packed_row_by_row():
    matrix = np.arange(16).reshape(4, 4)
    assert packed(matrix).tolist() == matrix[np.triu_indices(4)].tolist()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_unpacking_undoes_packing(size):
    matrix = np.random.default_rng(0).standard_normal((size, size))
    symmetric = matrix + matrix.T
    assert (unpacked(packed(symmetric), size) == symmetric).all()


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_honest_statistics_pass_after_the_wire(manifest, covariance, rank):
    told = statistics(manifest, correlated(LABELS), covariance, rank=rank)
    received = decode(encode(told), statistics_specs(CLASSES, FEATURES, covariance, rank))
    check_statistics(received, max_examples=721)


@pytest.mark.parametrize("offset", [0, 1e4])
def test_fewer_samples_than_features_pass(manifest, offset):
    for seed in range(10):
        data = correlated(np.repeat(range(4), [2, 3, 10, 30]), seed=seed, offset=offset)
        check_statistics(statistics(manifest, data), max_examples=45)


@pytest.mark.parametrize(("covariance", "rank"), KINDS)
def test_the_largest_float32_features_pass(manifest, covariance, rank):
    largest = np.finfo(np.float32).max
    images = np.full((9, 6, 6), largest, np.float32) * np.float32([1, -1, 1] * 3)[:, None, None]
    told = statistics(manifest, ArrayDataset(images, np.zeros(9, int)), covariance, rank=rank)
    check_statistics(told, max_examples=9)


def test_nothing_told_passes():
    check_statistics(
        {s.name: np.zeros(s.shape, s.dtype) for s in statistics_specs(CLASSES, FEATURES, "full")},
        max_examples=1,
    )


def lie(name, place, value):
    def tell(told):
        told[name][place] = value

    return tell


LIES = [
    ("diagonal", lie("mean", (0, 0), np.nan), "'mean' holds NaN"),
    ("full", lie("scatter", (0, 5), np.inf), "'scatter' holds NaN or infinite"),
    ("low_rank", lie("factor", (0, 0, 0), -np.inf), "'factor' holds NaN or infinite"),
    ("diagonal", lie("count", 2, -1), "count below 0"),
    ("diagonal", lie("count", 0, 702), "claims 723 examples, over the limit of 722"),
    ("diagonal", lie("count", slice(2), 1 << 62), "over the limit"),
    ("diagonal", lie("mean", (2, 1), 1e-3), "without an example a mean"),
    ("diagonal", lie("scatter", (2, 1), 1.0), "'scatter' gives a class of fewer than two"),
    ("full", lie("scatter", (3, 0), 1.0), "'scatter' gives a class of fewer than two"),
    ("low_rank", lie("factor", (3, 0, 0), 1.0), "'factor' gives a class of fewer than two"),
    ("diagonal", lie("mean", (0, 0), 1e39), "'mean' exceeds"),
    ("diagonal", lie("mean", (0, 0), -1e300), "'mean' exceeds"),
    ("diagonal", lie("scatter", (0, 4), -1e-9), "variance below 0"),
    ("low_rank", lie("scatter", (0, 4), -1e-9), "variance below 0"),
    ("full", lie("scatter", (0, FEATURES), -1.0), "variance below 0"),
    ("full", lie("scatter", (0, -1), -1.0), "variance below 0"),
    ("diagonal", lie("scatter", (0, 0), 1e300), "'scatter' exceeds"),
    ("low_rank", lie("factor", (0, 0, 0), -1e200), "'factor' exceeds"),
    ("full", lie("scatter", (0, 1), 1e9), "class 0 is not positive semi-definite"),
    ("full", lie("scatter", (1, 1), 1e308), "class 1 is not positive semi-definite"),
    ("full", lie("scatter", (0, FEATURES), 0.0), "class 0 is not positive semi-definite"),
]


@pytest.mark.parametrize(("covariance", "tell", "words"), LIES)
def test_a_lie_is_refused_in_words(manifest, covariance, tell, words):
    told = statistics(manifest, correlated(LABELS), covariance, rank=3 if covariance == "low_rank" else 0)
    tell(told)
    with pytest.raises(TensorError, match=words):
        check_statistics(told, max_examples=722)
