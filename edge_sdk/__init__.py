"""The device side: local training, evaluation and prediction, and the client that takes part in rounds."""

from edge_sdk._version import __version__
from edge_sdk.bundle import Bundle
from edge_sdk.client import EdgeClient, Visit
from edge_sdk.data import ArrayDataset
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
    "TensorError",
    "Visit",
    "__version__",
]
