"""Statistics of a device's features, class by class, for the calibration of the classifier (CCVR).

Luo et al., arXiv 2106.05001, section 4: count, mean and covariance of the penultimate features. What is sent
is the scatter, Σ (x − μ)(x − μ)ᵀ: it is defined for one sample, and scatters add up where covariances do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np

from edge_sdk.data import Dataset
from edge_sdk.data.labels import histogram, labels_of
from edge_sdk.errors import TensorError
from edge_sdk.examples import in_order
from edge_sdk.manifest import Manifest
from edge_sdk.noisy_statistics import FeatureNoise, hidden_counts, hidden_moments
from edge_sdk.runtime import Runtime
from edge_sdk.tensors import Array, Tensors, TensorSpec, check_finite

Covariance: TypeAlias = Literal["full", "diagonal", "low_rank"]
"""How much of a class's scatter leaves the device.

``full`` is all of it, as in the paper, ``diagonal`` the variances alone. ``low_rank`` is its largest
eigenpairs and, of what they leave, the diagonal, so that the diagonal of the whole is exact.
"""

MAX_FEATURE = float(np.finfo(np.float32).max)
"""Features are float32. In float64 the squares of their largest are far from overflow."""

ROUNDING = 1e-9
"""How far below 0 an eigenvalue of a scatter may come by rounding, as a share of the trace."""


def statistics_specs(
    classes: int, feature_size: int, covariance: Covariance, rank: int = 0
) -> list[TensorSpec]:
    """The tensors that a device sends.

    ``count`` int64 ``[classes]``, ``mean`` float64 ``[classes, d]`` and ``scatter`` float64:
    ``[classes, d(d+1)/2]``, the upper triangle row by row (see :func:`packed`), for ``full``;
    ``[classes, d]`` for ``diagonal``. ``low_rank`` adds ``factor`` float64 ``[classes, rank, d]``, F with
    scatter = FᵀF + a remainder, of which ``scatter`` ``[classes, d]`` is the diagonal.

    Raises:
        TensorError: ``low_rank`` without a rank from 1 to ``feature_size``, or a rank without it.

    >>> [spec.nbytes for spec in statistics_specs(1, 1280, "full")]
    [8, 10240, 6558720]
    """
    if not (1 <= rank <= feature_size if covariance == "low_rank" else rank == 0):
        raise TensorError(
            f"rank {rank} of a {covariance} covariance of {feature_size} features: give low_rank a rank "
            f"from 1 to {feature_size}, the others 0"
        )
    width = feature_size * (feature_size + 1) // 2 if covariance == "full" else feature_size
    specs = [
        TensorSpec("count", (classes,), "int64"),
        TensorSpec("mean", (classes, feature_size), "float64"),
        TensorSpec("scatter", (classes, width), "float64"),
    ]
    if covariance == "low_rank":
        specs.append(TensorSpec("factor", (classes, rank, feature_size), "float64"))
    return specs


def statistics_nbytes(classes: int, feature_size: int, covariance: Covariance, rank: int = 0) -> int:
    """Bytes of what one device sends; TensorError as in :func:`statistics_specs`.

    >>> [statistics_nbytes(10, 1280, covariance) for covariance in ("full", "diagonal")]
    [65689680, 204880]
    """
    return sum(spec.nbytes for spec in statistics_specs(classes, feature_size, covariance, rank))


def class_statistics(
    runtime: Runtime,
    manifest: Manifest,
    dataset: Dataset,
    indices: Array,
    *,
    covariance: Covariance,
    rank: int = 0,
    withhold_below: int = 0,
    noise: FeatureNoise | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Tensors:
    """Count, mean and scatter of the features of each class, with the runtime's current weights.

    One class after the other: beside the result, memory holds a batch of features and one d × d matrix,
    however large the data set. A class of fewer than ``withhold_below`` examples is all zero, as is one
    of none.

    Args:
        runtime: holds the global weights.
        manifest: of the runtime's bundle.
        dataset: the device's data.
        indices: which examples count, int ``[n]``.
        covariance: what to send of the scatter.
        rank: of ``low_rank``.
        withhold_below: the least number of examples of which a class's statistics are told; with noise, of
            the noisy count.
        noise: what hides the examples; None for exact statistics.
        cancelled: asked before each batch.

    Returns:
        The tensors of :func:`statistics_specs`.

    Raises:
        DataError: an example does not fit the model.
        TensorError: a rank out of its range, or features that are not finite: the model has diverged.
        Cancelled: ``cancelled()`` became true.
    """
    specs = statistics_specs(manifest.classes, manifest.feature_size, covariance, rank)
    tensors: Tensors = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in specs}
    labels = labels_of(dataset, indices, manifest.classes)
    if noise is None:
        tensors["count"] = histogram(labels, manifest.classes, withhold_below=withhold_below)
    else:
        counts = histogram(labels, manifest.classes)
        tensors["count"] = hidden_counts(counts, noise, withhold_below=withhold_below)

    def features(chosen: Array) -> Iterator[Array]:
        for x, _ in in_order(runtime, manifest, dataset, chosen, cancelled=cancelled):
            embedded = runtime.embed(x)
            if not np.isfinite(embedded).all():
                raise TensorError("the features are not finite: the model has diverged")
            yield embedded

    for label in np.flatnonzero(tensors["count"]).tolist():
        batches, diagonal = features(indices[labels == label]), covariance == "diagonal"
        if noise is None:
            mean, scatter = _moments(batches, diagonal=diagonal)
        else:
            mean, scatter = hidden_moments(
                batches,
                int(tensors["count"][label]),
                noise,
                name=str(label),
                feature_size=manifest.feature_size,
                diagonal=diagonal,
            )
        tensors["mean"][label] = mean
        if covariance == "low_rank":
            factor = _largest(scatter, rank)
            tensors["factor"][label] = factor
            # Rounding may leave less than nothing.
            tensors["scatter"][label] = np.maximum(scatter.diagonal() - (factor**2).sum(axis=0), 0.0)
        else:
            tensors["scatter"][label] = packed(scatter) if covariance == "full" else scatter
    return tensors


def packed(matrix: Array) -> Array:
    """The upper triangle of symmetric ``[d, d]``, row by row, ``[d(d+1)/2]``.

    >>> packed(np.array([[1, 2], [2, 3]])).tolist()
    [1, 2, 3]
    """
    return np.concatenate([row[i:] for i, row in enumerate(matrix)])


def unpacked(triangle: Array, feature_size: int) -> Array:
    """The symmetric matrix ``[d, d]`` of which :func:`packed` took the triangle."""
    matrix = np.zeros((feature_size, feature_size), triangle.dtype)
    matrix[np.triu_indices(feature_size)] = triangle
    symmetric: Array = matrix + np.triu(matrix, 1).T
    return symmetric


def check_statistics(tensors: Mapping[str, Array], *, max_examples: int) -> None:
    """Check that what a device sent can be the statistics of at most ``max_examples`` float32 features.

    Args:
        tensors: with the names, shapes and dtypes of :func:`statistics_specs`.
        max_examples: the largest count that one device may claim over all classes.

    Raises:
        TensorError: values that are not finite or beyond float32; counts below 0 or over
            ``max_examples``; a mean without an example; a scatter of fewer than two; a negative variance,
            or a full scatter that is not positive semi-definite.
    """
    check_finite(tensors)
    count, mean, scatter = tensors["count"], tensors["mean"], tensors["scatter"]
    # As Python's integers, which do not wrap.
    counts = count.tolist()
    if min(counts) < 0:
        raise TensorError("tensor 'count' holds a count below 0")
    if sum(counts) > max_examples:
        raise TensorError(f"tensor 'count' claims {sum(counts)} examples, over the limit of {max_examples}")
    if mean[count == 0].any():
        raise TensorError("tensor 'mean' gives a class without an example a mean")
    spread = [name for name in ("scatter", "factor") if name in tensors]
    if alone := [name for name in spread if tensors[name][count < 2].any()]:
        raise TensorError(f"tensor {alone[0]!r} gives a class of fewer than two examples a scatter")
    if np.abs(mean).max(initial=0.0) > MAX_FEATURE:
        raise TensorError("tensor 'mean' exceeds what a float32 feature can be")
    feature_size = mean.shape[1]
    full = scatter.shape[1] != feature_size
    # Row i of a packed triangle begins with its diagonal element and has d - i elements.
    variances = scatter[:, np.cumsum([0, *range(feature_size, 1, -1)])] if full else scatter
    if variances.min(initial=0.0) < 0:
        raise TensorError("tensor 'scatter' holds a variance below 0")
    # A scatter is at most count · (half the range)², by Popoviciu's inequality.
    largest = MAX_FEATURE * np.sqrt(count)
    roots = {"scatter": np.sqrt(variances)} | {name: tensors[name] for name in spread if name == "factor"}
    for name, values in roots.items():
        if (np.abs(values).reshape(len(count), -1).max(axis=1, initial=0.0) > largest).any():
            raise TensorError(f"tensor {name!r} exceeds what float32 features can be")
    if full:
        for label in np.flatnonzero(scatter.any(axis=1)).tolist():
            _check_semi_definite(unpacked(scatter[label], feature_size), label)


def _moments(batches: Iterable[Array], *, diagonal: bool) -> tuple[Array, Array]:
    """Mean and scatter, two passes a batch; batches are joined as Chan et al. (1979) do."""
    count, mean, scatter = 0, np.zeros(()), np.zeros(())
    for batch in batches:
        features = batch.astype(np.float64)
        total = count + len(features)
        batch_mean = features.mean(axis=0)
        features -= batch_mean
        apart = batch_mean - mean
        between = count * len(features) / total
        if diagonal:
            scatter = scatter + (features**2).sum(axis=0) + between * apart**2
        else:
            scatter = scatter + features.T @ features + between * np.outer(apart, apart)
        mean = mean + apart * (len(features) / total)
        count = total
    return mean, scatter


def _largest(scatter: Array, rank: int) -> Array:
    """The largest ``rank`` eigenpairs of ``scatter``, float64 ``[rank, d]``: F with FᵀF their sum."""
    values, vectors = np.linalg.eigh(scatter)
    factor: Array = (np.sqrt(np.maximum(values, 0.0)) * vectors)[:, ::-1][:, :rank].T
    return factor


def _check_semi_definite(matrix: Array, label: int) -> None:
    # Cholesky's factor exists for what is positive definite, and costs a tenth of the eigenvalues.
    try:
        np.linalg.cholesky(matrix + ROUNDING * np.trace(matrix) * np.eye(len(matrix)))
    except np.linalg.LinAlgError:
        raise TensorError(f"tensor 'scatter' of class {label} is not positive semi-definite") from None
