"""Make bundles from PyTorch models.

The names load on first use, so that taking an inference model out of a bundle needs no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_export.bundle import export_bundle
    from edge_export.describe import DescriberSettings
    from edge_export.errors import ExportError
    from edge_export.inference import inference_onnx
    from edge_sdk.manifest import Pipeline

__all__ = ["DescriberSettings", "ExportError", "Pipeline", "export_bundle", "inference_onnx"]

_HOME = {
    "DescriberSettings": "edge_export.describe",
    "ExportError": "edge_export.errors",
    "Pipeline": "edge_sdk.manifest",
    "export_bundle": "edge_export.bundle",
    "inference_onnx": "edge_export.inference",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'edge_export' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
