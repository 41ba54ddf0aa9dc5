"""Dividing one labelled data set among devices, from identical shares to one class a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Which examples each device has; no example is on two devices.

    ``indices`` holds one ascending int64 array a device. ``reassigned`` counts the examples that a device
    got from outside its own class distribution because the classes in it had run out.
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
            labels: the labels that were divided, int ``[N]``.
            classes: count of classes, above every label.
        """
        return np.stack([np.bincount(labels[chosen], minlength=classes) for chosen in self.indices])


def dirichlet_hsu(
    labels: Array, *, devices: int, alpha: float, seed: int, share: int | None = None
) -> Partition:
    """Non-identical label distributions of one size (Hsu et al., arXiv 1909.06335, section 3).

    Each device draws its class distribution q ~ Dir(α·p), p being that of the whole set, then its examples
    one after another without replacement; a class that runs out is renormalised away. Small α is the
    usual benchmark of label skew: 0.1 leaves a device two or three of ten classes.

    Where all classes of a device's q have run out (q is zero in float64 elsewhere, which a tiny α
    brings), the rest is drawn from what the other devices leave over; ``reassigned`` counts it.

    Args:
        labels: int ``[N]``, not negative.
        devices: count of devices.
        alpha: concentration from 0 to inf. inf is IID: examples drawn whatever their class. At 0 each
            device has one class, each class as many devices as its prior asks for.
        seed: not negative; the same seed gives the same partition.
        share: examples a device, ``N // devices`` by default. What is left over is on no device.

    Raises:
        DataError: labels, devices, alpha, seed or share outside their range.
    """
    labels = _checked(labels, devices, seed)
    share = len(labels) // devices if share is None else share
    if not 1 <= share <= len(labels) // devices:
        raise DataError(f"a share of {share} for each of {devices} devices: there are {len(labels)} examples")
    if math.isnan(alpha) or alpha < 0:
        raise DataError(f"alpha {alpha}: give a concentration from 0 (one class a device) to inf (IID)")
    generator = np.random.default_rng(seed)
    _, of_class, left = np.unique(labels, return_inverse=True, return_counts=True)

    counts = np.zeros((devices, len(left)), np.int64)
    if not math.isinf(alpha):
        distributions = _distributions(left / len(labels), devices, alpha, generator)
        for device in range(devices):
            counts[device] = _draw(distributions[device], left, share, generator)
            left = left - counts[device]
    # Only after every device has had its own: who ran short must not take what others still need.
    short = share - counts.sum(axis=1)
    for device in np.flatnonzero(short).tolist():
        more = generator.multivariate_hypergeometric(left, short[device], method="marginals")
        counts[device] += more
        left = left - more
    reassigned = 0 if math.isinf(alpha) else int(short.sum())
    return Partition(f"dirichlet(alpha={alpha:g})", _deal(of_class, counts, generator), seed, reassigned)


def iid(labels: Array, *, devices: int, seed: int) -> Partition:
    """Shares drawn uniformly, that differ in size by one example at most and leave none over.

    Raises:
        DataError: labels, devices or seed outside their range.
    """
    labels = _checked(labels, devices, seed)
    order = np.random.default_rng(seed).permutation(len(labels))
    return Partition("iid", [np.sort(part) for part in np.array_split(order, devices)], seed)


def plot_histogram(partition: Partition, labels: Array, class_names: tuple[str, ...] = ()) -> str:
    """An SVG document: a bar a device, made of its classes' shares."""
    from edge_simulation.charts import stacked_bars

    classes = max(len(class_names), int(labels.max()) + 1)
    names = class_names or tuple(str(label) for label in range(classes))
    return stacked_bars(
        partition.histogram(labels, classes), names, title=f"Labels by device, {partition.name}"
    )


def _checked(labels: Array, devices: int, seed: int) -> Array:
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0):
        raise DataError(f"labels are {labels.dtype} {list(labels.shape)}, expected integers from 0, [N]")
    if not 1 <= devices <= len(labels):
        raise DataError(f"cannot divide {len(labels)} examples among {devices} devices: each needs one")
    if seed < 0:
        raise DataError(f"seed {seed}: give an integer from 0")
    return labels


def _distributions(prior: Array, devices: int, alpha: float, generator: np.random.Generator) -> Array:
    """Each device's class distribution, float64 ``[devices, classes]``."""
    if alpha > 0:
        # Below the smallest normal float the sampler would see a concentration of zero.
        return generator.dirichlet(np.maximum(alpha * prior, 1e-300), devices)
    quotas = prior * devices
    takes = np.floor(quotas).astype(np.int64)
    # Largest remainders; ties broken at random, or the first classes would always have more devices.
    order = generator.permutation(len(prior))
    takes[order[np.argsort((takes - quotas)[order], kind="stable")][: devices - takes.sum()]] += 1
    owners = generator.permutation(np.repeat(np.arange(len(prior)), takes))
    distributions: Array = np.eye(len(prior))[owners]
    return distributions


def _draw(distribution: Array, left: Array, share: int, generator: np.random.Generator) -> Array:
    """Up to ``share`` examples by class, int64 ``[classes]``.

    Drawing a batch, keeping what there is and drawing the rest anew has the law of drawing one by one:
    renormalising is rejection. Every turn but the last exhausts a class, so it ends.
    """
    counts = np.zeros_like(left)
    while (need := share - int(counts.sum())) > 0:
        open_classes = np.flatnonzero((distribution > 0) & (counts < left))
        if len(open_classes) == 0:
            break
        q = distribution[open_classes]
        # Divided by the largest first: a sum of subnormals would not normalise.
        q = q / q.max()
        drawn = generator.multinomial(need, q / q.sum())
        counts[open_classes] = np.minimum(counts[open_classes] + drawn, left[open_classes])
    return counts


def _deal(of_class: Array, counts: Array, generator: np.random.Generator) -> list[Array]:
    """Turn counts int ``[devices, classes]`` into examples, drawn at random within each class."""
    decks = [generator.permutation(np.flatnonzero(of_class == label)) for label in range(counts.shape[1])]
    ends = counts.cumsum(axis=0)
    return [
        np.sort(
            np.concatenate(
                [deck[end - count : end] for deck, end, count in zip(decks, ends[d], counts[d], strict=True)]
            )
        )
        for d in range(len(counts))
    ]
