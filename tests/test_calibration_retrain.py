"""Re-training of the classifier, against scikit-learn's solution of the same convex problem."""

import msgspec
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from edge_sdk.errors import TensorError
from edge_server.calibration import Settings, retrain

CLASSES, D = 4, 36
WEIGHT, BIAS = "head.weight", "head.bias"
ALL = Settings()


@pytest.fixture(scope="module")
def manifest(paper):
    return paper.manifest


@pytest.fixture(scope="module")
def without_bias(paper):
    return msgspec.structs.replace(paper.manifest, head=(WEIGHT,))


def blobs(apart=1.0, count=400, seed=0):
    """Classes that overlap, with features correlated and of unlike sizes."""
    rng = np.random.default_rng(seed)
    mixing = (np.eye(D) + 0.15 * rng.standard_normal((D, D))) * np.logspace(-0.5, 0.5, D)
    labels = np.repeat(np.arange(CLASSES), count)
    centres = apart * rng.standard_normal((CLASSES, D)) / 3
    return (centres[labels] + rng.standard_normal((len(labels), D))) @ mixing + 2, labels


def a_head(seed=1, scale=0.1):
    rng = np.random.default_rng(seed)
    weight = (scale * rng.standard_normal((CLASSES, D))).astype(np.float32)
    return {WEIGHT: weight, BIAS: rng.standard_normal(CLASSES).astype(np.float32)}


def logits(head, features):
    return features @ head[WEIGHT].astype(float).T + head.get(BIAS, np.zeros(CLASSES))


def cross_entropy(scores, labels):
    scores = scores - scores.max(axis=1, keepdims=True)
    chosen = scores[np.arange(len(labels)), labels]
    return float((np.log(np.exp(scores).sum(axis=1)) - chosen).mean())


def accuracy(scores, labels):
    return float((scores.argmax(axis=1) == labels).mean())


@pytest.mark.parametrize("bias", [True, False])
def test_it_comes_to_the_optimum_of_the_convex_problem(manifest, without_bias, bias):
    features, labels = blobs(count=150)
    model = LogisticRegression(C=1e4, max_iter=5000, tol=1e-6, fit_intercept=bias).fit(features, labels)
    best = cross_entropy(model.decision_function(features), labels)
    head = a_head() if bias else {WEIGHT: a_head()[WEIGHT]}
    settings = Settings(epochs=40, lr=0.1, weight_decay=0.0)
    new = retrain(head, manifest if bias else without_bias, features, labels, settings)
    assert cross_entropy(logits(head, features), labels) > 2 * best
    assert best <= cross_entropy(logits(new, features), labels) < 1.02 * best


def test_the_defaults_come_near_the_optimum_on_fresh_features(manifest):
    features, labels = blobs(count=800)
    learnt, fresh = slice(None, None, 2), slice(1, None, 2)
    model = LogisticRegression(max_iter=5000).fit(features[learnt], labels[learnt])
    new = retrain(a_head(), manifest, features[learnt], labels[learnt], ALL)
    best = accuracy(model.decision_function(features[fresh]), labels[fresh])
    assert accuracy(logits(new, features[fresh]), labels[fresh]) > best - 0.01


def test_a_good_classifier_stays_good(manifest):
    features, labels = blobs()
    model = LogisticRegression(C=1e4, max_iter=5000).fit(features, labels)
    head = {WEIGHT: model.coef_.astype(np.float32), BIAS: model.intercept_.astype(np.float32)}
    new = retrain(head, manifest, features, labels, ALL)
    before, after = (cross_entropy(logits(h, features), labels) for h in (head, new))
    assert after < 1.02 * before


def test_no_epoch_leaves_the_bits(manifest):
    features, labels = blobs()
    head = a_head()
    new = retrain(head, manifest, features, labels, Settings(epochs=0))
    assert all(new[name].tobytes() == head[name].tobytes() for name in head)


def test_no_feature_leaves_the_bits(manifest):
    head = a_head()
    new = retrain(head, manifest, np.zeros((0, D)), np.zeros(0, np.int64), ALL)
    assert all(new[name].tobytes() == head[name].tobytes() for name in head)


def test_the_head_that_came_is_not_written_to(manifest):
    head, copy = a_head(), a_head()
    retrain(head, manifest, *blobs(), ALL)
    assert all((head[name] == copy[name]).all() for name in head)


def test_shapes_and_dtypes_stay(manifest):
    head = a_head()
    new = retrain(head, manifest, *blobs(), ALL)
    assert {n: (a.shape, a.dtype) for n, a in new.items()} == {n: (a.shape, a.dtype) for n, a in head.items()}


def test_a_class_without_features_keeps_its_row(manifest):
    features, labels = blobs()
    seen, head = labels != 2, a_head()
    new = retrain(head, manifest, features[seen], labels[seen], ALL)
    assert (new[WEIGHT][2].tobytes(), new[BIAS][2]) == (head[WEIGHT][2].tobytes(), head[BIAS][2])
    assert (new[WEIGHT][[0, 1, 3]] != head[WEIGHT][[0, 1, 3]]).any(axis=1).all()


def test_a_class_without_features_is_not_unlearned(manifest):
    features, labels = blobs(apart=3.0)
    model = LogisticRegression(max_iter=5000).fit(features, labels)
    head = {WEIGHT: model.coef_.astype(np.float32), BIAS: model.intercept_.astype(np.float32)}
    seen = labels != 2
    new = retrain(head, manifest, features[seen], labels[seen], ALL)
    assert accuracy(logits(new, features[~seen]), labels[~seen]) > 0.8


def test_rows_move_about_their_common_mean(manifest):
    head = a_head()
    new = retrain(head, manifest, *blobs(), ALL)
    np.testing.assert_allclose(new[WEIGHT].mean(axis=0), head[WEIGHT].mean(axis=0), atol=1e-5)


def test_one_class_alone_teaches_nothing(manifest):
    features, labels = blobs()
    head = a_head()
    new = retrain(head, manifest, features[labels == 1], labels[labels == 1], ALL)
    assert all((new[name] == head[name]).all() for name in head)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
@pytest.mark.parametrize("bias", [True, False])
def test_the_scale_of_the_features_does_not_matter(manifest, without_bias, scale, bias):
    features, labels = blobs()
    head = a_head() if bias else {WEIGHT: a_head()[WEIGHT]}
    scaled = head | {WEIGHT: head[WEIGHT] / np.float32(scale)}
    model = manifest if bias else without_bias
    new = retrain(head, model, features, labels, ALL)
    other = retrain(scaled, model, features * scale, labels, ALL)
    np.testing.assert_allclose(other[WEIGHT] * scale, new[WEIGHT], rtol=1e-4, atol=1e-5)


def test_separable_features_leave_weights_bounded(manifest):
    features, labels = blobs(apart=1000.0)
    new = retrain(a_head(scale=0.0), manifest, features, labels, Settings(epochs=100))
    assert accuracy(logits(new, features), labels) == 1
    # Without weight decay or an end the optimum would be at infinity.
    assert np.abs(logits(new, features)).max() < 100


@pytest.mark.parametrize(
    "features",
    [
        np.zeros((400, D)),
        np.full((400, D), 0.1),
        np.full((400, D), 3e38),
        1e-40 * np.random.default_rng(0).standard_normal((400, D)),
        3e38 * np.random.default_rng(0).standard_normal((400, D)).clip(-1, 1),
        np.random.default_rng(0).standard_normal((400, 1)) * np.ones(D),
        np.random.default_rng(0).standard_normal((400, D)) * (np.arange(D) == 0),
    ],
    ids=["zero", "constant", "huge constant", "denormal", "huge", "one direction", "one feature"],
)
@pytest.mark.parametrize("lr", [0.05, 100.0])
def test_degenerate_features_give_finite_weights(manifest, without_bias, features, lr):
    labels = np.arange(400) % CLASSES
    for model in (manifest, without_bias):
        head = {name: a_head()[name] for name in model.head}
        new = retrain(head, model, features, labels, Settings(lr=lr, epochs=3))
        assert all(np.isfinite(tensor).all() for tensor in new.values())


def test_features_that_tell_nothing_leave_the_weights_alone(manifest):
    head = a_head()
    new = retrain(head, manifest, np.full((400, D), 0.1), np.arange(400) % CLASSES, ALL)
    np.testing.assert_allclose(new[WEIGHT], head[WEIGHT], atol=1e-3)


def test_a_classifier_of_huge_weights_stays_finite(manifest):
    new = retrain(a_head(scale=1e30), manifest, *blobs(), ALL)
    assert all(np.isfinite(tensor).all() for tensor in new.values())


def test_the_same_seed_gives_the_same_bits(manifest):
    same = [retrain(a_head(), manifest, *blobs(), Settings(seed=3))[WEIGHT].tobytes() for _ in range(2)]
    other = retrain(a_head(), manifest, *blobs(), Settings(seed=4))[WEIGHT].tobytes()
    assert same[0] == same[1] != other


def test_weight_decay_pulls_to_the_classifier_that_came(manifest):
    head = a_head()
    far, near = (
        retrain(head, manifest, *blobs(), Settings(weight_decay=decay))[WEIGHT] for decay in (0.0, 1.0)
    )
    assert np.linalg.norm(near - head[WEIGHT]) < 0.5 * np.linalg.norm(far - head[WEIGHT])


def test_float32_features_give_what_float64_gives(manifest):
    features, labels = blobs()
    single = features.astype(np.float32)
    new, same = (retrain(a_head(), manifest, x, labels, ALL) for x in (single, single.astype(float)))
    assert (new[WEIGHT] == same[WEIGHT]).all()


@pytest.mark.parametrize("shape", [(8, D - 1), (7, D), (8, D, 1)])
def test_features_of_another_shape_are_refused(manifest, shape):
    with pytest.raises(TensorError, match="features are"):
        retrain(a_head(), manifest, np.zeros(shape), np.zeros(8, int), ALL)


def test_features_that_are_not_finite_are_refused(manifest):
    features, labels = blobs()
    features[3, 3] = np.nan
    with pytest.raises(TensorError, match="'features' holds NaN"):
        retrain(a_head(), manifest, features, labels, ALL)


def test_a_head_that_is_not_finite_is_refused_by_name(manifest):
    head = a_head()
    head[BIAS][0] = np.inf
    with pytest.raises(TensorError, match=r"'head\.bias' holds"):
        retrain(head, manifest, *blobs(), ALL)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("per_class", -1),
        ("shrinkage", -1.0),
        ("shrinkage", np.inf),
        ("epochs", -1),
        ("lr", 0.0),
        ("lr", 101.0),
        ("lr", np.nan),
        ("batch_size", 0),
        ("weight_decay", -1e-9),
        ("weight_decay", 21.0),
        ("weight_decay", np.nan),
        ("seed", -1),
    ],
)
def test_a_setting_out_of_its_range_is_refused_by_name(setting, value):
    with pytest.raises(ValueError, match=setting):
        Settings(**{setting: value})


def test_an_unknown_balance_is_refused():
    with pytest.raises(ValueError, match="balance"):
        Settings(balance="even")
