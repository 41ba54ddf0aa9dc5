"""The device side: local training, evaluation and prediction, and the client that takes part in rounds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edge_sdk._version import __version__

if TYPE_CHECKING:
    from edge_sdk.bundle import Bundle
    from edge_sdk.client import EdgeClient, Visit
    from edge_sdk.data import ArrayDataset
    from edge_sdk.description import Sharing
    from edge_sdk.errors import (
        BrokerError,
        BundleError,
        DataError,
        EdgeError,
        ProtocolError,
        RefusedError,
        RunError,
        RuntimeUnavailableError,
        TensorError,
    )
    from edge_sdk.training import Progress
    from edge_sdk.transport import Credentials
    from edge_sdk.work import Engine

__all__ = [
    "ArrayDataset",
    "BrokerError",
    "Bundle",
    "BundleError",
    "Credentials",
    "DataError",
    "EdgeClient",
    "EdgeError",
    "Engine",
    "Progress",
    "ProtocolError",
    "RefusedError",
    "RunError",
    "RuntimeUnavailableError",
    "Sharing",
    "TensorError",
    "Visit",
    "__version__",
]

_HOMES = {
    "bundle": ("Bundle",),
    "client": ("EdgeClient", "Visit"),
    "data": ("ArrayDataset",),
    "description": ("Sharing",),
    "training": ("Progress",),
    "transport": ("Credentials",),
    "work": ("Engine",),
}


def __getattr__(name: str) -> Any:
    # On demand: the command must be there to catch Ctrl-C before anything slow is imported.
    if name in __all__:
        home = next((home for home, names in _HOMES.items() if name in names), "errors")
        return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
