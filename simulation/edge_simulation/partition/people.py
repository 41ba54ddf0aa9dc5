"""Devices that are the people whom the data came from."""

from __future__ import annotations

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array
from edge_simulation.partition.shares import Partition


def natural(people: Array) -> Partition:
    """One device a person, in ascending order of their ids; sizes and labels are as they come.

    Args:
        people: who each example is from, integers or strings ``[N]``.

    Raises:
        DataError: no examples, or ids of another kind.

    >>> [part.tolist() for part in natural(np.array([7, 3, 7])).indices]
    [[1], [0, 2]]
    """
    people = np.asarray(people)
    if people.ndim != 1 or people.dtype.kind not in "iuU" or len(people) == 0:
        raise DataError(f"people are {people.dtype} {list(people.shape)}, expected integers or strings [N]")
    _, owners = np.unique(people, return_inverse=True)
    return Partition("natural", [np.flatnonzero(owners == owner) for owner in range(owners.max() + 1)], 0)
