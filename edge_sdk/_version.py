"""The version, read by the package and by the protocol."""

__version__ = "0.1.0"
