"""Devices that hold a few runs of a set sorted by label (McMahan et al., arXiv 1602.05629, section 3)."""

from __future__ import annotations

import numpy as np

from edge_sdk.errors import DataError
from edge_sdk.tensors import Array
from edge_simulation.partition.draw import checked
from edge_simulation.partition.shares import Partition


def shards(labels: Array, *, devices: int, shards_per_device: int, seed: int) -> Partition:
    """The set sorted by label and cut in equal shards, of which each device gets as many at random.

    The pathological split of the first paper on FedAvg: 100 devices with two of 200 shards of MNIST have
    two of its digits, most of them. Shards differ in size by one example at most; none is left over.

    Args:
        labels: int ``[N]``, not negative.
        devices: count of devices.
        shards_per_device: 2 in the paper.
        seed: not negative; also draws which examples of a class are in which of its shards.

    Raises:
        DataError: labels, devices, shards_per_device or seed outside their range, or more shards than
            examples.
    """
    labels = checked(labels, devices, seed)
    if not 1 <= shards_per_device <= len(labels) // devices:
        raise DataError(
            f"{devices} devices with {shards_per_device} shards each: {len(labels)} examples make that no "
            f"more than {len(labels) // devices} a device"
        )
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    cut = np.array_split(order, devices * shards_per_device)
    hands = generator.permutation(len(cut)).reshape(devices, shards_per_device)
    indices = [np.sort(np.concatenate([cut[shard] for shard in hand])) for hand in hands.tolist()]
    return Partition(f"shards({shards_per_device} a device)", indices, seed)
