"""Virtual fleets on one machine: data sets, their partitions, brokers and the report of a run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_simulation.broker import EmbeddedBroker, MosquittoBroker

__all__ = ["EmbeddedBroker", "MosquittoBroker"]

_HOME = {"EmbeddedBroker": "broker", "MosquittoBroker": "broker"}


def __getattr__(name: str) -> Any:
    # On demand: a broker's process must start without loading NumPy, and `python -m` warns of a module
    # that its package has loaded already.
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
