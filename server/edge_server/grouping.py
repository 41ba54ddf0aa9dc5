"""Groups of devices with similar data, of which a round takes one device each (FLDG, arXiv 2201.12515)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np

from edge_sdk.errors import RunError, TensorError
from edge_sdk.tensors import Array

_LARGEST = 2.0**53
_STARTS = 10


def group(descriptors: Mapping[str, Array], *, groups: int, seed: int) -> dict[str, int]:
    """K-Means over the devices' descriptors, by scikit-learn.

    Devices with equal descriptors are in one group. Where there are no more different descriptors than
    ``groups``, each makes a group of its own, so there may be fewer groups than asked for; none is empty.

    Args:
        descriptors: by device id, all of one length: hashes int64 [dims] (FLDG-L), or mean features
            float64 [features] (FLDG).
        groups: how many are wanted, at least 1; 10 for 100 devices in the paper.
        seed: of the first centres, from 0. The same descriptors and seed give the same groups, in
            whatever order the mapping holds them.

    Returns:
        A group for each device: numbers from 0 in the order of the groups' first ids.

    Raises:
        RunError: ``groups`` or ``seed`` out of range, or scikit-learn is not installed.
        TensorError: a device's descriptor has another shape than the first one's, or is not finite.
    """
    if groups < 1 or seed < 0:
        raise RunError(f"cannot make {groups} groups with seed {seed}: at least 1 group, and a seed from 0")
    if not descriptors:
        return {}
    ids = sorted(descriptors)
    rows = _matrix({device: descriptors[device] for device in ids})
    distinct, which = np.unique(rows, axis=0, return_inverse=True)
    which = which.reshape(-1)
    # Asked for no fewer centres than there are points, K-Means could still leave some without any.
    labels = which if len(distinct) <= groups else _k_means(rows, groups, seed)
    numbers: dict[int, int] = {}
    return {
        device: numbers.setdefault(label, len(numbers))
        for device, label in zip(ids, labels.tolist(), strict=True)
    }


def _matrix(descriptors: Mapping[str, Array]) -> Array:
    shape = next(iter(descriptors.values())).shape
    for device, descriptor in descriptors.items():
        if descriptor.ndim != 1 or descriptor.shape != shape or descriptor.size == 0:
            raise TensorError(
                f"device {device!r}: a descriptor {list(descriptor.shape)}, expected {list(shape)}, one axis"
            )
        # Beyond 2**53 the squares of distances lose what tells devices apart, and then overflow.
        if not (np.abs(descriptor.astype(np.float64)) <= _LARGEST).all():
            raise TensorError(f"device {device!r}: its descriptor is not finite, or beyond 2**53")
    return np.stack([descriptor.astype(np.float64) for descriptor in descriptors.values()])


def _k_means(rows: Array, groups: int, seed: int) -> Array:
    try:
        from sklearn.cluster import k_means
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError:
        raise RunError("grouping needs scikit-learn: pip install scikit-learn") from None
    start = int(np.random.default_rng(seed).integers(1 << 32))  # scikit-learn takes 32 bits
    # Threads add up a centre's rows in the order in which they finish.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        labels: Array = k_means(rows, groups, n_init=_STARTS, random_state=start)[1]
    return labels
