"""Who has which examples, and how unlike the devices are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array


@dataclass(frozen=True, slots=True)
class Summary:
    """A partition in figures.

    Attributes:
        name: of the partition, with its parameters.
        devices: count of devices, those without examples included.
        examples: count on the devices, all together.
        left_over: labels that are on no device.
        smallest: examples on the smallest device.
        largest: examples on the largest device.
        classes_per_device: mean count of classes that a device has examples of.
        divergence_from_global: mean over devices of KL(device ‖ all devices together), in nats.
        divergence_from_uniform: mean over devices of KL(device ‖ uniform over the classes), in nats.
            Astraea's measure (arXiv 1907.01132). Neither mean counts a device without examples.
        reassigned: as :class:`Partition`.
    """

    name: str
    devices: int
    examples: int
    left_over: int
    smallest: int
    largest: int
    classes_per_device: float
    divergence_from_global: float
    divergence_from_uniform: float
    reassigned: int


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Which examples each device has; no example is on two devices.

    ``indices`` holds one ascending int64 array a device. ``reassigned`` counts the examples that a device
    got against the partition's own law: because its classes had run out, or because it had too few.
    """

    name: str
    indices: list[Array]
    seed: int
    reassigned: int = 0

    def __len__(self) -> int:
        """Count of devices."""
        return len(self.indices)

    def histogram(self, labels: Array, classes: int) -> Array:
        """Examples of each class on each device, int64 ``[devices, classes]``.

        Args:
            labels: the labels that were divided, int ``[N]``; of the whole set after :meth:`within`.
            classes: count of classes, above every label.

        Raises:
            DataError: a label that is not below ``classes``.
        """
        labels = np.asarray(labels)
        if len(labels) and labels.max() >= classes:
            raise DataError(f"label {labels.max()}, expected 0 to {classes - 1}: give the count of classes")
        return np.stack([np.bincount(labels[chosen], minlength=classes) for chosen in self.indices])

    def within(self, subset: Array) -> Partition:
        """The same partition, of a subset's labels, as indices into the whole set.

        Args:
            subset: int ``[n]``, the example that each of the divided labels belongs to, none twice.

        Raises:
            DataError: an example twice, or fewer than were divided.
        """
        subset = np.asarray(subset, np.int64)
        divided = 1 + max((int(chosen[-1]) for chosen in self.indices if len(chosen)), default=-1)
        if len(subset) < divided or len(np.unique(subset)) < len(subset):
            raise DataError(
                f"a subset of {len(subset)} examples, some twice or fewer than the {divided} divided: give "
                "the indices that the partition's labels were taken from"
            )
        return replace(self, indices=[np.sort(subset[chosen]) for chosen in self.indices])

    def summary(self, labels: Array, classes: int) -> Summary:
        """The partition in figures; arguments and errors as :meth:`histogram`."""
        counts = self.histogram(labels, classes)
        sizes = counts.sum(axis=1)
        whole = counts.sum(axis=0)
        return Summary(
            name=self.name,
            devices=len(self),
            examples=int(sizes.sum()),
            left_over=len(labels) - int(sizes.sum()),
            smallest=int(sizes.min()),
            largest=int(sizes.max()),
            classes_per_device=float((counts > 0).sum(axis=1).mean()),
            divergence_from_global=_mean_divergence(counts, whole),
            divergence_from_uniform=_mean_divergence(counts, np.ones(classes)),
            reassigned=self.reassigned,
        )


def plot_histogram(partition: Partition, labels: Array, class_names: tuple[str, ...] = ()) -> str:
    """An SVG document: a bar a device, made of its classes' shares."""
    from edge_simulation.charts import stacked_bars

    classes = max(len(class_names), int(labels.max()) + 1)
    names = class_names or tuple(str(label) for label in range(classes))
    return stacked_bars(
        partition.histogram(labels, classes), names, title=f"Labels by device, {partition.name}"
    )


def _mean_divergence(counts: Array, reference: Array) -> float:
    """Mean KL in nats of the rows that hold examples; ``reference`` is above 0 wherever a row is."""
    filled = counts[counts.sum(axis=1) > 0]
    if len(filled) == 0:
        return 0.0
    shares = filled / filled.sum(axis=1, keepdims=True)
    ratios = np.divide(shares, reference / reference.sum(), out=np.ones_like(shares), where=shares > 0)
    return float((shares * np.log(ratios)).sum(axis=1).mean())
