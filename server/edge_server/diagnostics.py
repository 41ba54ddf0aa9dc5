"""What non-identical data does to models, in figures: how alike local models are, how biased the classifier,
how balanced mediators, how pure groups. Each is a pure function; ``edge_simulation`` draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.examples import EVALUATION_BATCH
from edge_sdk.manifest import Manifest
from edge_sdk.runtime import Runtime
from edge_sdk.tensors import Array
from edge_server.mediators import divergence


def linear_cka(x: Array, y: Array) -> float:
    """Linear centred kernel alignment of two models' features for the same examples.

    ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) in Frobenius norms, columns centred (Kornblith et al., arXiv 1905.00414,
    section 3). 1 for features equal up to rotation, one scale and a shift; 0 for unrelated ones, and, our
    reading, where either does not vary. Give many more examples than features: with few, everything looks
    alike.

    Args:
        x: ``[n, p]``, n at least 2; further dimensions are flattened into p.
        y: ``[n, q]``.

    Raises:
        DataError: features that are not finite, of fewer than 2 examples, or of other examples.
    """
    return float(cka_matrix([x, y])[0, 1])


def cka_matrix(features: Sequence[Array]) -> Array:
    """:func:`linear_cka` of every pair of models, float64 ``[models, models]``.

    Args:
        features: of each model ``[n, …]``, for the same n examples in the same order.

    Raises:
        DataError: as :func:`linear_cka` does; it names the model by its place.
    """
    if len({len(each) for each in features}) > 1:
        raise DataError(
            f"features of {[len(each) for each in features]} examples: give the same to all models"
        )
    bases = [_basis(each, f"features {place}") for place, each in enumerate(features)]
    shared = np.zeros((len(bases), len(bases)))
    for i, x in enumerate(bases):
        for j, y in enumerate(bases[: i + 1]):
            shared[i, j] = shared[j, i] = np.square(y.T @ x).sum()
    scale = np.sqrt(np.diag(shared))
    alike = np.divide(shared, np.outer(scale, scale), out=np.zeros_like(shared), where=shared > 0)
    return np.asarray(np.minimum(alike, 1.0))


def program_cka(runtime: Runtime, local: Sequence[Mapping[str, Array]], images: Array) -> dict[str, Array]:
    """CKA between local models at the two layers that a bundle's programs show.

    Args:
        runtime: of the models' bundle; it is left with the last model's weights.
        local: weights and buffers of each local model.
        images: float32 ``[n, *entering]``, as :func:`edge_sdk.examples.enter` makes them.

    Returns:
        ``features`` (what enters the head) and ``logits``, each float64 ``[models, models]``.

    Raises:
        DataError: as :func:`cka_matrix` does.
    """
    layers: dict[str, list[Array]] = {"features": [], "logits": []}
    parts = [images[start : start + EVALUATION_BATCH] for start in range(0, len(images), EVALUATION_BATCH)]
    for weights in local if parts else ():
        runtime.set_weights(weights)
        layers["features"].append(np.concatenate([runtime.embed(part) for part in parts]))
        layers["logits"].append(np.concatenate([runtime.predict(part) for part in parts]))
    return {layer: cka_matrix(features) for layer, features in layers.items()}


def head_norms(weights: Mapping[str, Array], manifest: Manifest) -> Array:
    """L2 norm of each class's row in the last layer's weight, float64 ``[classes]``.

    After training on skewed data the rows of frequent classes are longer (Luo et al., arXiv 2106.05001,
    section 3.2): the bias that calibration takes away.
    """
    return np.asarray(np.linalg.norm(weights[manifest.head[0]].astype(np.float64), axis=1))


def correlation(x: Array, y: Array) -> float:
    """Pearson's correlation of two ``[n]``; 0, our reading, where either does not vary.

    Raises:
        DataError: arrays that are empty, of different lengths or not finite.
    """
    if x.shape != y.shape or x.ndim != 1 or not len(x):
        raise DataError(f"cannot correlate {list(x.shape)} with {list(y.shape)}: give two [n]")
    first, second = (_centred(each[:, None], "the values").ravel() for each in (x, y))
    return float(np.clip(first @ second, -1, 1))


def mediator_divergences(histograms: Mapping[str, Array], chains: Sequence[Sequence[str]]) -> Array:
    """KL(labels ‖ uniform) of each mediator, natural logarithm, float64 ``[chains]``.

    Counts are summed over a chain's devices and then normalised. Its mean is Astraea's figure (Duan et al.,
    arXiv 1907.01132); with every device a chain of its own it is that of the partition.

    Args:
        histograms: examples of each class by device, int64 ``[classes]``.
        chains: of device ids, none of them empty.

    Raises:
        DataError: an empty chain, or a device without a histogram.
    """
    found = []
    for chain in chains:
        unknown = [device for device in chain if device not in histograms]
        if unknown or not chain:
            raise DataError(f"no histogram of device {unknown[0]!r}" if unknown else "a chain has no devices")
        found.append(divergence(np.sum([histograms[device] for device in chain], axis=0)))
    return np.array(found, np.float64)


def group_composition(groups: Mapping[str, int], labels: Mapping[str, int]) -> Array:
    """How many devices of each group have each label, int64 ``[groups, labels]``.

    Args:
        groups: of each device, from 0.
        labels: of each device, from 0: the class that it has most of, say.

    Raises:
        DataError: a device without a label, or a negative number.
    """
    if unknown := [device for device in groups if device not in labels]:
        raise DataError(f"device {unknown[0]!r} is in a group but has no label")
    pairs = np.array([(groups[device], labels[device]) for device in groups], np.int64).reshape(-1, 2)
    if pairs.min(initial=0) < 0:
        raise DataError("groups and labels are numbered from 0, one is negative")
    composition = np.zeros(pairs.max(axis=0, initial=-1) + 1, np.int64)
    np.add.at(composition, tuple(pairs.T), 1)
    return composition


def group_purity(composition: Array) -> float:
    """Share of devices that have the most frequent label of their group; 0 without devices.

    >>> group_purity(np.array([[3, 1], [0, 4]]))
    0.875
    """
    return float(composition.max(axis=1, initial=0).sum() / max(composition.sum(), 1))


def chance_purity(composition: Array, *, draws: int = 1000, seed: int = 0) -> float:
    """The purity to expect of groups of these sizes drawn at random from the same devices.

    It is well above one in the number of labels where groups are small. A mean over ``draws`` seeded draws of
    each group.
    """
    rng = np.random.default_rng([seed, 0x9EC])
    sizes, labels = composition.sum(axis=1), composition.sum(axis=0)
    drawn = [rng.multivariate_hypergeometric(labels, size, draws) for size in sizes.tolist()]
    expected = sum(float(each.max(axis=1, initial=0).mean()) for each in drawn)
    return expected / max(int(sizes.sum()), 1)


def _centred(x: Array, name: str) -> Array:
    """``x`` [n, p] in float64 with columns centred and norm 1, or 0 where no column varies."""
    values = x.astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"{name} hold NaN or infinite values")
    values = values / (np.abs(values).max(initial=0) or 1.0)
    size = np.linalg.norm(values)
    values -= values.mean(axis=0)
    norm = np.linalg.norm(values)
    # What is left of equal values after centring is rounding, and has a direction all the same.
    return values / norm if norm > 1e-12 * size else np.zeros_like(values)


def _basis(x: Array, name: str) -> Array:
    """A matrix [n, min(n, p)] with the centred features' Gram matrix: the pairs' products stay small."""
    if len(x) < 2:
        raise DataError(f"{name} are of {len(x)} examples: CKA compares at least 2")
    centred = _centred(x.reshape(len(x), -1), name)
    return centred if centred.shape[1] <= len(x) else np.asarray(np.linalg.qr(centred.T, mode="r")).T
