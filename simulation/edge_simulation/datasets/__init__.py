"""The data sets of the demo and the benchmarks, each with its training and its test part."""

from edge_simulation.datasets.load import load_train_test
from edge_simulation.datasets.train_test import TrainTest

__all__ = ["TrainTest", "load_train_test"]
