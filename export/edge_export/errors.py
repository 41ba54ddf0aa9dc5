"""Why a model cannot be exported."""

from edge_sdk.errors import EdgeError


class ExportError(EdgeError):
    """The model does something that a bundle cannot hold; the message names the module or operator."""
