"""The frozen part of a model of which devices train the head: lowered with its weights, and verified.

In float32, or with eight bits, whose ranges a few hundred images give.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

import numpy as np
import torch
from torch import Tensor, nn

from edge_export import programs
from edge_export.classifier import first_line
from edge_export.errors import ExportError
from edge_export.folding import frozen
from edge_export.onnx import lower
from edge_export.quantisation import quantised
from edge_export.runtimes import frozen_executorch
from edge_export.split import Split
from edge_export.verify import frozen_as_near
from edge_sdk.examples import FROZEN_BATCH
from edge_sdk.manifest import MAX_AXES, MAX_FEATURES, Backbone
from edge_sdk.runtime import onnx
from edge_sdk.tensors import Array

PATHS = {"onnx": "onnx/backbone.onnx", "executorch": "executorch/backbone.pte"}
COARSE = 0.5
"""How far int8 features may lie from those in float32: the norm of the difference as a share of their own."""

ROUNDED, TIES = 0.5, 0.02
"""How far a runtime's may lie from the quantised network's in PyTorch: ROUNDED of the distance of those from
float32, plus TIES. A sum may round to the next integer, which grows to 0.3 through MobileNetV2's layers."""


def backbone_members(
    parts: Split,
    input_shape: tuple[int, int, int],
    runtimes: Collection[str],
    *,
    calibration: Array | None = None,
    seed: int = 0,
) -> tuple[Backbone, dict[str, bytes]]:
    """What the manifest says of the frozen part, and the members of the bundle that it names.

    Args:
        parts: the model, parted.
        input_shape: (C, H, W) of one image.
        runtimes: of ``onnx``, ``executorch``.
        calibration: images as they enter the model, float32 [n, C, H, W], for int8; None for float32.
        seed: of the images of the verification, where there are none for calibration.

    Raises:
        ExportError: the part cannot be traced, is too large, has an operator that a runtime lacks, or gives
            other features in a runtime than in PyTorch; or what int8 takes is not installed.
    """
    numbers = int(np.prod(parts.shape))
    if len(parts.shape) > MAX_AXES or numbers > MAX_FEATURES:
        raise ExportError(
            f"{numbers} numbers of an image enter the head: devices keep at most {MAX_FEATURES}"
        )
    network = frozen(parts.backbone, input_shape)
    if calibration is not None:
        images = torch.from_numpy(calibration)
        network = quantised(network, torch.split(images, FROZEN_BATCH))
    else:
        images = torch.randn(FROZEN_BATCH + 1, *input_shape, generator=torch.Generator().manual_seed(seed))
    # More than ExecuTorch takes at a time.
    expected = _Expected(
        parts.backbone, images[: FROZEN_BATCH + 1], network if calibration is not None else None
    )
    shapes = input_shape, parts.shape
    members: dict[str, bytes] = {}
    if "onnx" in runtimes:
        members[PATHS["onnx"]] = program = lower(programs.frozen(network, input_shape))
        expected.check(onnx.open_frozen(program, "backbone", *shapes, threads=1), "ONNX Runtime")
    if "executorch" in runtimes:
        members[PATHS["executorch"]], run = frozen_executorch("backbone", network, *shapes)
        expected.check(run, "ExecuTorch")
    return Backbone(parts.shape, {runtime: PATHS[runtime] for runtime in runtimes}), members


class _Expected:
    """Features in PyTorch, and how far those of a runtime may lie from them."""

    def __init__(self, network: nn.Module, images: Tensor, rounded: nn.Module | None) -> None:
        self._images = images.numpy()
        self._single = _features(network, images)
        if not np.isfinite(self._single).all():
            raise ExportError("the frozen part gives features that are not finite: are its weights?")
        if rounded is None:
            self._exact = _features(copy.deepcopy(network).double(), images.double())
        else:
            self._exact = _features(rounded, images)
            self._lost = _distance(self._exact, self._single)
            if not self._lost <= COARSE:
                raise ExportError(
                    f"the int8 features lie {self._lost:.0%} of their norm from those in float32: calibrate "
                    "with images like the devices', or export without int8"
                )
        self._rounded = rounded is not None

    def check(self, run: Callable[[Array], Array], runtime: str) -> None:
        """Raise ExportError if a program does not give them."""
        found = run(self._images)
        if self._rounded:
            good = _distance(found, self._exact) <= ROUNDED * self._lost + TIES
        else:
            good = frozen_as_near(found, self._single, self._exact)
        if not good:
            raise ExportError(
                f"the frozen part gives other features in {runtime} than in PyTorch: does it draw random "
                "numbers, or look across the batch?"
            )


def _features(network: nn.Module, images: Tensor) -> Array:
    """Of the first image by itself: what looks across the batch shows."""
    try:
        with torch.no_grad():
            parts = [part for part in (images[:1], images[1:]) if len(part)]
            return torch.cat([network(part) for part in parts]).double().numpy()
    except RuntimeError as error:
        raise ExportError(
            f"the frozen part cannot be verified in {images.dtype} ({first_line(error)}): follow x.dtype in "
            "forward"
        ) from error


def _distance(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))
