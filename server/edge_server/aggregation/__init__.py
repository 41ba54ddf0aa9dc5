"""Aggregation: the exact mean of a round's updates, and the strategies that make a model of it."""

from edge_server.aggregation.fedadam import fedadam
from edge_server.aggregation.fedavg import fedavg, fedprox
from edge_server.aggregation.fedavgm import fedavgm
from edge_server.aggregation.mean import MeanUpdate, Precision, WeightedSum, plan_precision
from edge_server.aggregation.noisy import Noise, NoisySum
from edge_server.aggregation.norm import bound_norm
from edge_server.aggregation.robust import RobustMean
from edge_server.aggregation.strategy import State, Strategy

__all__ = [
    "MeanUpdate",
    "Noise",
    "NoisySum",
    "Precision",
    "RobustMean",
    "State",
    "Strategy",
    "WeightedSum",
    "bound_norm",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedprox",
    "plan_precision",
]
