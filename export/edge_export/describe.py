"""The describe program: a frozen MobileNetV2 on a data set's own images, and the hash of its mean feature.

FLDG-L (arXiv 2201.12515) with the p-stable hash of Datar et al. (SoCG 2004). The paper leaves open what a
device hashes and how images reach the network; the mean feature and what :func:`program` does to an image
are our reading.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from edge_export.errors import ExportError
from edge_export.models.mobilenet_v2 import MobileNetV2
from edge_export.onnx import lower
from edge_export.pretrained import Pretrained, mobilenet_v2
from edge_export.programs import Program, frozen
from edge_export.runtimes import frozen_executorch
from edge_export.verify import frozen_as_near
from edge_sdk.manifest import MAX_DIMS, Describe
from edge_sdk.runtime import onnx
from edge_sdk.tensors import Array, encode

LSH = "describe/lsh.safetensors"
ONNX = "onnx/describe.onnx"
EXECUTORCH = "executorch/describe.pte"
MIN_SIZE, MAX_SIZE = 32, 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriberSettings:
    """How a bundle describes a device's data.

    Args:
        weights: what :func:`edge_export.pretrained.mobilenet_v2` takes, or what it gives.
        dims: integers in a descriptor. More of them tell more of the data; with 32, devices of one class
            each are grouped as well as by their features, with 8 not quite where they hold few images.
        size: pixels a side that images are resized to; below 64 the published weights see next to nothing.
        width: r, of the hash's buckets: 3.0 in the paper.
        seed: of the hash, and of the weights where they are random.
    """

    weights: str | os.PathLike[str] | Pretrained | None = None
    dims: int = 32
    size: int = 96
    width: float = 3.0
    seed: int = 0


def describe_members(
    settings: DescriberSettings,
    input_shape: tuple[int, int, int],
    runtimes: Collection[str] = ("onnx",),
) -> tuple[Describe, dict[str, bytes]]:
    """What the manifest says of the describer, and the members of the bundle that it names.

    Raises:
        ExportError: a setting outside its range, images of other than 1 or 3 channels, weights that
            cannot be read, a program that does not do as PyTorch does, or a runtime that is not installed.
    """
    if not 1 <= settings.dims <= MAX_DIMS or not MIN_SIZE <= settings.size <= MAX_SIZE:
        raise ExportError(
            f"a describer of {settings.dims} dimensions at {settings.size} pixels: give 1 to {MAX_DIMS} "
            f"dimensions and {MIN_SIZE} to {MAX_SIZE} pixels"
        )
    if not 0 < settings.width < math.inf or settings.seed < 0:
        raise ExportError(
            f"a hash of width {settings.width} and seed {settings.seed}: the width must be above 0 and "
            "finite, the seed not below 0"
        )
    if input_shape[0] not in (1, 3):
        raise ExportError(
            f"images of {input_shape[0]} channels cannot be described: MobileNetV2 takes grey or RGB"
        )
    weights = settings.weights
    pretrained = weights if isinstance(weights, Pretrained) else mobilenet_v2(weights, seed=settings.seed)
    feature_size = pretrained.network.feature_size
    members = {LSH: encode(draw_hash(settings.dims, feature_size, settings.width, settings.seed))}
    shapes, named = (input_shape, (feature_size,)), {}
    if "onnx" in runtimes:
        named["onnx"] = ONNX
        members[ONNX] = lower(program(pretrained, input_shape, settings.size))
        run = onnx.open_frozen(members[ONNX], "describe", *shapes, threads=1)
        _verify(run, pretrained, input_shape, settings)
    if "executorch" in runtimes:
        named["executorch"] = EXECUTORCH
        network = Describing(pretrained, input_shape, settings.size)
        members[EXECUTORCH], run = frozen_executorch("describe", network, *shapes)
        _verify(run, pretrained, input_shape, settings)
    return Describe(feature_size, settings.dims, LSH, named), members


def draw_hash(dims: int, features: int, width: float, seed: int) -> dict[str, Array]:
    """The hash's tensors, float64: ``a`` [dims, features], normal; ``b`` [dims], uniform in [0, r); ``r``."""
    generator = np.random.default_rng(seed)
    a = generator.standard_normal((dims, features))
    b = generator.random(dims) * width
    return {"a": a, "b": b, "r": np.array(width)}


def program(pretrained: Pretrained, input_shape: tuple[int, int, int], size: int) -> Program:
    """From ``x``, float32 [B, C, H, W] in [0, 1], to ``features``, float32 [B, feature_size]."""
    return frozen(Describing(pretrained, input_shape, size), input_shape)


class Describing(nn.Module):
    """What the program computes: features float32 [B, feature_size] of images [B, C, H, W] in [0, 1].

    Images are resized to ``size`` pixels a side (bilinear, with a wider filter where they shrink, as
    Pillow does), made RGB where they are grey, normalised as the weights want it, and run through the
    network, whose BatchNorms are folded into its convolutions.
    """

    def __init__(self, pretrained: Pretrained, input_shape: tuple[int, int, int], size: int) -> None:
        super().__init__()
        _, height, width = input_shape
        self.network = _folded(pretrained.network)
        self.rows, self.columns = _interpolation(height, size), _interpolation(width, size)
        self.mean, self.std = (torch.tensor(v).view(3, 1, 1) for v in (pretrained.mean, pretrained.std))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - torch's protocol
        resized = functional.linear(functional.linear(x.mT, self.rows).mT, self.columns)
        # One channel of grey becomes three here.
        features: Tensor = self.network.embed((resized - self.mean) * (1 / self.std))
        return features


def _interpolation(extent: int, size: int) -> Tensor:
    """Bilinear resizing along one axis as a matrix [size, extent]."""
    unit = torch.eye(extent)[None, None]
    return functional.interpolate(unit, size=(size, extent), mode="bilinear", antialias=True)[0, 0]


def _folded(network: MobileNetV2) -> MobileNetV2:
    network = copy.deepcopy(network).double().eval()
    for layers in [module for module in network.modules() if isinstance(module, nn.Sequential)]:
        for i in range(len(layers) - 1):
            layer, norm = layers[i], layers[i + 1]
            if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                layers[i], layers[i + 1] = fuse_conv_bn_eval(layer, norm), nn.Identity()
    return network.float()


def _verify(
    run: Callable[[Array], Array],
    pretrained: Pretrained,
    input_shape: tuple[int, int, int],
    settings: DescriberSettings,
) -> None:
    """Hold the program against PyTorch on random images: its own resizing, BatchNorms that are not folded."""
    images = torch.rand(2, *input_shape, generator=torch.Generator().manual_seed(settings.seed))
    found = run(images.numpy())
    exact = _features(pretrained, images.double(), settings.size)
    single = _features(pretrained, images, settings.size)
    if not frozen_as_near(found, single, exact):
        raise ExportError("the describe program gives other features than PyTorch: are its weights finite?")


def _features(pretrained: Pretrained, images: Tensor, size: int) -> Array:
    network = copy.deepcopy(pretrained.network).to(images.dtype).eval()
    resized = functional.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(v, dtype=images.dtype).view(3, 1, 1) for v in (pretrained.mean, pretrained.std))
    with torch.no_grad():
        features: Tensor = network.embed((resized - mean) / std)
    return features.double().numpy()
