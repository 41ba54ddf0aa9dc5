"""Dividing one labelled data set among devices.

Every function takes labels and a seed and gives a :class:`Partition`: indices a device, a summary and a
plot. Two papers call two things α: ``dirichlet_hsu(alpha=0.1)`` draws each device's distribution over
classes, ``dirichlet_per_class(alpha=0.1)`` each class's distribution over devices.

Partitions divide any part of a data set. A long-tailed fleet, whose test set stays balanced:

>>> import numpy as np
>>> labels = np.arange(6000) % 10
>>> tail = long_tail(labels, ratio=10, seed=0)
>>> fleet = dirichlet_hsu(labels[tail], devices=20, alpha=0.1, seed=0).within(tail)
>>> fleet.histogram(labels, 10).sum(axis=0).tolist()
[600, 464, 359, 278, 215, 166, 129, 100, 77, 60]
"""

from edge_simulation.partition.astraea import balanced, client_imbalanced
from edge_simulation.partition.hsu import dirichlet_hsu
from edge_simulation.partition.people import natural
from edge_simulation.partition.per_class import dirichlet_per_class
from edge_simulation.partition.shard import shards
from edge_simulation.partition.shares import Partition, Summary, plot_histogram
from edge_simulation.partition.sizes import iid, quantity_skew
from edge_simulation.partition.tail import long_tail

__all__ = [
    "Partition",
    "Summary",
    "balanced",
    "client_imbalanced",
    "dirichlet_hsu",
    "dirichlet_per_class",
    "iid",
    "long_tail",
    "natural",
    "plot_histogram",
    "quantity_skew",
    "shards",
]
