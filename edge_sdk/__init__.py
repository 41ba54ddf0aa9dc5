"""The device side: local training, evaluation and prediction, and the client that takes part in rounds."""

from edge_sdk.bundle import Bundle
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

__all__ = [
    "BrokerError",
    "Bundle",
    "BundleError",
    "DataError",
    "EdgeError",
    "ProtocolError",
    "RefusedError",
    "RunError",
    "RuntimeUnavailableError",
    "TensorError",
]
