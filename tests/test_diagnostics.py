"""Diagnostics, against Gram matrices, scipy, hand counts and every permutation."""

import math
from itertools import permutations

import numpy as np
import pytest
from quadrants import quadrants
from scipy import stats

from edge_sdk.data import prepare
from edge_sdk.errors import DataError
from edge_sdk.runtime import open_runtime
from edge_server.diagnostics import (
    chance_purity,
    cka_matrix,
    correlation,
    group_composition,
    group_purity,
    head_norms,
    linear_cka,
    mediator_divergences,
    program_cka,
)


def features(n, p, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, p)) @ rng.standard_normal((p, p)) + rng.standard_normal(p)


def rotation(p, seed=9):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((p, p)))[0]


def cka_by_hsic(x, y):
    """Kornblith et al., equations 2 to 4: HSIC(K, L) = tr(KHLH) / (n − 1)² with K = XXᵀ, L = YYᵀ."""
    n = len(x)
    h = np.eye(n) - np.full((n, n), 1 / n)

    def hsic(k, m):
        return np.trace(k @ h @ m @ h) / (n - 1) ** 2

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / math.sqrt(hsic(k, k) * hsic(m, m))


@pytest.mark.parametrize(("n", "p", "q"), [(40, 5, 8), (12, 30, 4), (10, 25, 40), (2, 1, 3)])
def test_cka_is_the_normalised_hsic_of_the_gram_matrices(n, p, q):
    x = features(n, p)
    y = features(n, q, seed=1) + (x[:, :1] if n > 2 else 0)
    assert linear_cka(x, y) == pytest.approx(cka_by_hsic(x, y), rel=1e-9)


@pytest.mark.parametrize("p", [6, 40])
def test_cka_does_not_see_rotation_scale_or_shift(p):
    x, y = features(20, p), features(20, 7, seed=1)
    turned = -1e3 * x @ rotation(p) + 5
    assert linear_cka(turned, x) == pytest.approx(1, rel=1e-9)
    assert linear_cka(turned, y) == pytest.approx(linear_cka(x, y), rel=1e-9)


def test_cka_sees_a_scale_of_one_feature_alone():
    x = features(30, 4)
    assert linear_cka(x, x * [100, 1, 1, 1]) < 0.99


def test_cka_of_features_without_a_common_direction_is_0():
    x = np.array([[1.0], [-1.0], [1.0], [-1.0]])
    assert linear_cka(x, np.array([[1.0], [1.0], [-1.0], [-1.0]])) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_cka_of_the_smallest_and_largest_features_is_exact(scale):
    x, y = features(20, 3), features(20, 4, seed=1)
    assert linear_cka(x * scale, y) == pytest.approx(linear_cka(x, y), rel=1e-9)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e8])
def test_cka_with_features_that_do_not_vary_is_0(value):
    assert linear_cka(np.full((7, 3), value), features(7, 2)) == 0
    assert linear_cka(np.full((7, 3), value), np.full((7, 3), value)) == 0


def test_the_matrix_holds_every_pair_and_ones_on_its_diagonal():
    models = [features(15, p, seed=p) for p in (3, 20, 6)]
    matrix = cka_matrix(models)
    expected = [[cka_by_hsic(x, y) for y in models] for x in models]
    np.testing.assert_allclose(matrix, expected, rtol=1e-9)
    assert (matrix <= 1).all()
    assert (matrix == matrix.T).all()


def test_feature_maps_are_flattened():
    maps = features(10, 24).reshape(10, 2, 3, 4)
    assert linear_cka(maps, maps.reshape(10, 24)) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((3, 2)), np.zeros((4, 2)), r"features of \[3, 4\] examples"),
        (np.ones((1, 2)), np.ones((1, 2)), "at least 2"),
        (np.eye(3), np.array([[1.0], [2.0], [math.nan]]), "features 1 hold NaN"),
    ],
)
def test_features_that_cannot_be_compared_are_refused(x, y, message):
    with pytest.raises(DataError, match=message):
        linear_cka(x, y)


def test_a_bundles_programs_give_both_layers_of_every_local_model(norm):
    images, _ = prepare(quadrants(300), np.arange(300), norm.manifest.input, norm.manifest.classes)
    rng = np.random.default_rng(1)
    other = {
        n: (w + 0.3 * rng.standard_normal(w.shape)).astype(w.dtype) if "running" not in n else w
        for n, w in norm.weights.items()
    }
    runtime, seen = open_runtime(norm, threads=1), []
    found = program_cka(runtime, [norm.weights, other], images)
    for weights in (norm.weights, other):
        runtime.set_weights(weights)
        seen.append((runtime.embed(images), runtime.predict(images)))
    assert found["features"][0, 1] == pytest.approx(cka_by_hsic(seen[0][0], seen[1][0]), rel=1e-4)
    assert found["logits"][1, 0] == pytest.approx(cka_by_hsic(seen[0][1], seen[1][1]), rel=1e-4)


def test_head_norms_are_those_of_the_last_layers_rows(paper):
    weight = paper.weights[paper.manifest.head[0]]
    expected = [math.sqrt(sum(float(w) ** 2 for w in row)) for row in weight]
    np.testing.assert_allclose(head_norms(paper.weights, paper.manifest), expected, rtol=1e-12)


def test_correlation_is_pearsons():
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 500, 10)
    norms = 1 + counts * 1e-3 + rng.standard_normal(10)
    assert correlation(norms, counts) == pytest.approx(stats.pearsonr(norms, counts).statistic, rel=1e-12)


def test_correlation_with_equal_counts_is_0():
    assert correlation(np.array([1.0, 2.0, 3.0]), np.full(3, 77)) == 0


@pytest.mark.parametrize(("x", "y"), [(np.ones(3), np.ones(2)), (np.ones(0), np.ones(0))])
def test_what_cannot_be_correlated_is_refused(x, y):
    with pytest.raises(DataError, match="cannot correlate"):
        correlation(x, y)


def test_a_mediators_divergence_is_that_of_its_devices_summed_counts():
    histograms = {"a": np.array([10, 0, 0]), "b": np.array([0, 30, 2]), "c": np.array([5, 5, 5])}
    found = mediator_divergences(histograms, [["a", "b"], ["c"], ["a"]])
    expected = [stats.entropy([10, 30, 2], [1, 1, 1]), 0, math.log(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("chain", "message"), [(["a", "x"], "of device 'x'"), ([], "no devices")])
def test_a_chain_of_unknown_or_no_devices_is_refused(chain, message):
    with pytest.raises(DataError, match=message):
        mediator_divergences({"a": np.array([1, 2])}, [["a"], chain])


GROUPS = {"a": 0, "b": 0, "c": 0, "d": 2, "e": 2}
LABELS = {"e": 1, "a": 1, "b": 1, "c": 0, "d": 2, "not grouped": 3}


def test_a_groups_composition_counts_its_devices_by_label():
    assert group_composition(GROUPS, LABELS).tolist() == [[1, 2, 0], [0, 0, 0], [0, 1, 1]]


def test_purity_is_the_share_of_devices_with_their_groups_majority_label():
    assert group_purity(group_composition(GROUPS, LABELS)) == (2 + 1) / 5


def test_no_devices_have_no_purity():
    nothing = group_composition({}, {})
    assert (group_purity(nothing), chance_purity(nothing)) == (0, 0)


def test_chance_purity_is_the_mean_over_every_way_to_deal_the_devices():
    composition = np.array([[2, 1, 0], [0, 1, 1], [1, 0, 0]])
    dealt = list(permutations([0, 0, 0, 1, 1, 2]))
    parts = (slice(0, 3), slice(3, 5), slice(5, 6))
    pure = [sum(max(np.bincount(deal[part])) for part in parts) / 6 for deal in dealt]
    assert chance_purity(composition, draws=40_000) == pytest.approx(np.mean(pure), abs=0.005)


def test_chance_purity_of_one_group_is_its_own():
    composition = np.array([[3, 4, 1]])
    assert chance_purity(composition) == group_purity(composition)


def test_the_same_seed_gives_the_same_chance():
    composition = np.array([[3, 4, 1], [2, 0, 5]])
    assert chance_purity(composition, seed=1) == chance_purity(composition, seed=1)
    assert chance_purity(composition, seed=1) != chance_purity(composition, seed=2)


@pytest.mark.parametrize(
    ("groups", "labels", "message"),
    [({"a": 0}, {}, "'a' is in a group but has no label"), ({"a": -1}, {"a": 0}, "negative")],
)
def test_groups_that_do_not_fit_their_labels_are_refused(groups, labels, message):
    with pytest.raises(DataError, match=message):
        group_composition(groups, labels)
