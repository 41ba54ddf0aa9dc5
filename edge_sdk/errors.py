"""The errors that users see. Each message is one line that names the thing and the fix."""


class EdgeError(Exception):
    """Base of every error raised on purpose; commands print it and exit with status 2."""


class BundleError(EdgeError):
    """A bundle is truncated, tampered with, of an unknown schema, or not a bundle."""


class DataError(EdgeError):
    """A data set is empty, unreadable, or does not fit the model's input or classes."""


class TensorError(EdgeError):
    """Tensors do not have the declared names, shapes, dtypes or finite values."""


class RuntimeUnavailableError(EdgeError):
    """The runtime or execution provider asked for cannot be had here."""


class BrokerError(EdgeError):
    """The broker cannot be reached, refuses the connection, or drops it for good."""


class ProtocolError(EdgeError):
    """A message, id or chunk breaks the protocol; its sender is at fault."""


class RefusedError(EdgeError):
    """The server refuses this device, for the reason given (an id in use, say)."""


class RunError(EdgeError):
    """A run cannot start or go on (too few devices, a store in use, a bound that would overflow)."""
