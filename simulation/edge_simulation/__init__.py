"""Virtual fleets on one machine: data sets, their partitions, brokers and the report of a run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_simulation.broker import EmbeddedBroker, MosquittoBroker
    from edge_simulation.datasets import TrainTest, load_train_test
    from edge_simulation.engine import Simulated, simulate
    from edge_simulation.partition import (
        Partition,
        balanced,
        client_imbalanced,
        dirichlet_hsu,
        dirichlet_per_class,
        iid,
        long_tail,
        natural,
        plot_histogram,
        quantity_skew,
        shards,
    )
    from edge_simulation.report import Report, RunResult, summary, write_report

__all__ = [
    "EmbeddedBroker",
    "MosquittoBroker",
    "Partition",
    "Report",
    "RunResult",
    "Simulated",
    "TrainTest",
    "balanced",
    "client_imbalanced",
    "dirichlet_hsu",
    "dirichlet_per_class",
    "iid",
    "load_train_test",
    "long_tail",
    "natural",
    "plot_histogram",
    "quantity_skew",
    "shards",
    "simulate",
    "summary",
    "write_report",
]

_NAMES = {
    "broker": ("EmbeddedBroker", "MosquittoBroker"),
    "datasets": ("TrainTest", "load_train_test"),
    "partition": (
        "Partition",
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
    ),
    "engine": ("Simulated", "simulate"),
    "report": ("Report", "RunResult", "summary", "write_report"),
}


def __getattr__(name: str) -> Any:
    # On demand: a broker's process must start without loading NumPy, and `python -m` warns of a module
    # that its package has loaded already.
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
