"""What a device tells of its data without sending it, as far as its app consents. docs/privacy.md says what
each of these leaks."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_sdk.data import Dataset
from edge_sdk.data.labels import histogram, labels_of
from edge_sdk.errors import DataError, EdgeError, TensorError
from edge_sdk.features import Describer
from edge_sdk.manifest import Manifest
from edge_sdk.noise import discrete_laplace
from edge_sdk.noisy_statistics import FeatureNoise
from edge_sdk.protocol.messages import Fact, Task
from edge_sdk.tensors import Array, Tensors, TensorSpec, check_finite, decode, views

LARGEST = 2.0**53
"""Of a descriptor's values: beyond it distances lose what tells devices apart."""

LARGEST_MULTIPLE = 1000.0
"""By which a count with noise is multiplied, whatever the plan says."""
LEAST_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What an app lets leave the device, if a run needs it. Nothing by default.

    Args:
        histogram: how many examples of each class the device has.
        descriptor: the hash of the images' mean feature.
        feature: that mean feature itself.
        statistics: count, mean and scatter of each class's features under the run's model.
        withhold_below: a class with fewer examples is left out of histogram and statistics, as if there
            were none. A mean of one example is that example's feature. Where there is noise, what is looked
            at is the noisy count.
        histogram_epsilon: ε of two-sided geometric noise on the histogram, for one example more or less; 0
            for none. Asked again of the same data, the client gives the same answer.
        statistics_noise: z of Gaussian noise on the statistics, 0 for none; ``feature_norm`` is the length
            to which each feature is clipped before.
    """

    histogram: bool = False
    descriptor: bool = False
    feature: bool = False
    statistics: bool = False
    withhold_below: int = 5
    histogram_epsilon: float = 0.0
    statistics_noise: float = 0.0
    feature_norm: float = 0.0
    _told: dict[tuple[int, ...], Array] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.withhold_below < 0:
            raise DataError(f"withhold_below is {self.withhold_below}: give a count of examples from 0")
        for name in ("histogram_epsilon", "statistics_noise", "feature_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise DataError(f"{name} is {getattr(self, name)}: give a finite number from 0")
        if 0 < self.histogram_epsilon < LEAST_EPSILON:
            raise DataError(f"histogram_epsilon is below {LEAST_EPSILON:g}: share no histogram instead")
        if bool(self.statistics_noise) != bool(self.feature_norm):
            raise DataError(
                "statistics_noise hides only clipped features: give feature_norm with it, or none"
            )

    def feature_noise(self) -> FeatureNoise | None:
        """New noise for one answer; None where there is none."""
        if not self.statistics_noise:
            return None
        return FeatureNoise(self.statistics_noise, self.feature_norm, secrets.token_bytes(32))

    def hidden(self, counts: Array) -> Array:
        """A histogram int64 ``[classes]`` with its noise, never below 0, classes withheld by that count."""
        key = tuple(counts.tolist())
        if key not in self._told:
            noise = [discrete_laplace(self.histogram_epsilon) for _ in key]
            noisy = np.maximum(counts + np.array(noise, np.int64), 0)
            # Of data that changes the last answer alone is kept.
            self._told.clear()
            self._told[key] = np.where(noisy < self.withhold_below, 0, noisy)
        return self._told[key]


def refuse_unshared(task: Task, sharing: Sharing) -> None:
    """Raise EdgeError if the app lets nothing of what ``task`` wants leave the device."""
    wanted = task.wants if task.kind == "describe" else ("statistics",) if task.kind == "statistics" else ()
    if wanted and not any(getattr(sharing, name) for name in wanted):
        raise EdgeError(f"this device does not share its {' or '.join(wanted)}")


def describe(
    dataset: Dataset,
    indices: Array,
    manifest: Manifest,
    wants: Iterable[Fact],
    sharing: Sharing,
    *,
    trained: Callable[[], tuple[Dataset, Array]],
    multiples: Mapping[int, float] | None = None,
    open_describer: Callable[[], Describer],
    cancelled: Callable[[], bool] = lambda: False,
) -> Tensors:
    """The facts of ``wants`` that are shared, as tensors by the facts' names: see :func:`description_specs`.

    Args:
        indices: the examples to describe.
        trained: gives the data set and the indices that training uses, which the histogram is of. Copies
            do not lift a class over ``withhold_below``.
        multiples: by class, to how many times its examples training has augmented it. A histogram with
            noise is multiplied by them, so that copies give no example a larger part in it.
        open_describer: called only where images must be looked at.

    Raises:
        DataError: an example does not fit the model.
        BundleError: the bundle holds no describe program.
        Cancelled: ``cancelled()`` became true.
    """
    told: Tensors = {}
    shared = [fact for fact in wants if getattr(sharing, fact)]
    if "histogram" in shared:
        labels = labels_of(dataset, indices, manifest.classes)
        if sharing.histogram_epsilon:
            noisy = sharing.hidden(histogram(labels, manifest.classes))
            factors = [(multiples or {}).get(label, 1.0) for label in range(manifest.classes)]
            told["histogram"] = np.rint(noisy * np.clip(factors, 1.0, LARGEST_MULTIPLE)).astype(np.int64)
        else:
            own = histogram(labels, manifest.classes, withhold_below=sharing.withhold_below)
            counts = histogram(labels_of(*trained(), manifest.classes), manifest.classes)
            told["histogram"] = np.where(own > 0, counts, 0)
    if {"descriptor", "feature"} & set(shared):
        describer = open_describer()
        mean = describer.mean_feature(dataset, indices, cancelled=cancelled)
        if "feature" in shared:
            told["feature"] = mean
        if "descriptor" in shared:
            told["descriptor"] = describer.hashing.lsh(mean)
    return told


def description_specs(wants: Iterable[Fact], manifest: Manifest) -> list[TensorSpec]:
    """Tensors of a description: ``histogram`` int64 [classes], ``descriptor`` int64 [dims], ``feature``
    float64 [features]."""
    features = manifest.describe
    shapes: dict[Fact, tuple[tuple[int, ...], str]] = {"histogram": ((manifest.classes,), "int64")}
    if features is not None:
        shapes["descriptor"] = ((features.dims,), "int64")
        shapes["feature"] = ((features.feature_size,), "float64")
    return [TensorSpec(fact, *shapes[fact]) for fact in wants if fact in shapes]


def check_description(
    data: bytes, wants: Iterable[Fact], manifest: Manifest, *, max_examples: int
) -> Tensors:
    """Decode a description, of which the device may leave facts out.

    Args:
        max_examples: the most that one device may claim to have.

    Raises:
        TensorError: not the tensors that were wanted, none of them, counts below 0 or over the most, or
            values that are not finite or too large to be compared.
    """
    names = views(data)
    specs = [spec for spec in description_specs(wants, manifest) if spec.name in names]
    told = decode(data, specs)
    if not told:
        raise TensorError("the description is empty: decline where nothing is shared")
    check_finite(told)
    for name in {"descriptor", "feature"} & told.keys():
        if (np.abs(told[name].astype(np.float64)) > LARGEST).any():
            raise TensorError(f"the {name} holds a value beyond 2**53, by which devices cannot be grouped")
    if "histogram" in told:
        # As Python's integers, which do not wrap.
        counts = told["histogram"].tolist()
        if min(counts) < 0:
            raise TensorError("the histogram holds a negative count")
        if sum(counts) > max_examples:
            raise TensorError(
                f"the histogram claims {sum(counts)} examples, over the limit of {max_examples}"
            )
    return told
