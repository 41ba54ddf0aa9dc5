"""What a bundle says of itself: the typed form of ``manifest.json`` (specified in docs/bundle.md)."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np

from edge_sdk.errors import BundleError
from edge_sdk.tensors import TensorSpec

SCHEMA = 1
MAX_TENSORS = 10_000
MAX_ELEMENTS = 1 << 31
MAX_NOISE = 1 << 24
"""Numbers of noise that one sample may take: a step allocates them for a whole batch."""
MAX_FEATURES = 1 << 24
"""Numbers that a backbone may make of one image: devices keep those of all their examples."""
MAX_AXES = 8
MAX_CLASSES = 1 << 20
MAX_DIMS = 4096
_DTYPES = ("float32", "int64")

Rule: TypeAlias = Literal["mean", "statistic", "counter"]
"""How the server aggregates a tensor.

``mean`` is a trainable parameter: averaged, with server momentum. ``statistic`` is a running mean or
variance, or a frozen parameter: averaged, never with momentum. ``counter`` is an integer: the largest
advance, never a float.
"""

Option: TypeAlias = Literal["momentum", "proximal", "clipping"]
"""What a train program can do beyond SGD with weight decay; each costs inputs and time, so each is asked for
at the export."""

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One weight or buffer of the model and its rule of aggregation."""

    name: str
    shape: tuple[Size, ...]
    dtype: Literal["float32", "int64"]
    rule: Rule

    @property
    def spec(self) -> TensorSpec:
        """Name, shape and dtype alone, for checking tensors."""
        return TensorSpec(self.name, self.shape, self.dtype)


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an image goes through before it enters the model, as in TensorFlow's CIFAR tutorial.

    Args:
        size: height and width of the data set's images. The model's own are cut out of them: anywhere in
            training, from the middle otherwise.
        flip: mirror every second image, by chance, in training.
        standardise: take its mean off each image, and divide by its deviation, last of all.
    """

    size: tuple[Size, Size]
    flip: bool = False
    standardise: bool = False


class Input(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The model's input: one float32 image ``[channels, height, width]``.

    An unsigned-byte image is scaled to [0, 1] first; then ``(x - mean) / std`` a channel; then the rest of
    the pipeline, where there is one.
    """

    shape: tuple[Size, Size, Size]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pipeline: Pipeline | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``[channels, height, width]`` of the data set's images."""
        return self.shape if self.pipeline is None else (self.shape[0], *self.pipeline.size)


class Noise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input of uniform noise in [0, 1) that a dropout layer takes; ``shape`` is that of one sample."""

    name: str
    shape: tuple[Size, ...]


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size in bytes and hex SHA-256 of one file in the bundle."""

    size: Size
    sha256: str


class Programs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The member that holds each program of one runtime."""

    train: str
    evaluate: str
    predict: str
    embed: str


class Backbone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frozen network before a model of which devices train the head alone.

    Its features, float32 ``shape`` of one image, are what the four programs take in the image's place;
    ``programs`` has the member of each runtime.
    """

    shape: tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_FEATURES)], ...]
    programs: dict[str, str]


class Describe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frozen network whose mean feature, hashed to ``dims`` integers, describes a device's data.

    ``lsh`` is the member that holds the hash's tensors, ``programs`` has the member of each runtime.
    """

    feature_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    dims: Annotated[int, msgspec.Meta(ge=1, le=MAX_DIMS)]
    lsh: str
    programs: dict[str, str]

    @property
    def specs(self) -> list[TensorSpec]:
        """The tensors of the member ``lsh``."""
        shapes = {"a": (self.dims, self.feature_size), "b": (self.dims,), "r": ()}
        return [TensorSpec(name, shape, "float64") for name, shape in shapes.items()]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a bundle except the bytes of its members."""

    schema: int = SCHEMA
    name: str
    task: Literal["classification"] = "classification"
    input: Input
    classes: Annotated[int, msgspec.Meta(ge=2, le=MAX_CLASSES)]
    class_names: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...]
    head: tuple[str, ...]
    feature_size: Size
    noise: tuple[Noise, ...] = ()
    options: tuple[Option, ...] = ()
    runtimes: dict[str, Programs]
    backbone: Backbone | None = None
    describe: Describe | None = None
    members: dict[str, Member] = {}

    @property
    def entering(self) -> tuple[int, ...]:
        """Shape of one example as the four programs take it: an image's, or that of a backbone's features."""
        return self.input.shape if self.backbone is None else self.backbone.shape

    @property
    def specs(self) -> list[TensorSpec]:
        """The declaration against which weights and updates are checked."""
        return [parameter.spec for parameter in self.parameters]

    @property
    def rules(self) -> dict[str, Rule]:
        """Rule of aggregation by tensor name."""
        return {parameter.name: parameter.rule for parameter in self.parameters}

    @property
    def trainable(self) -> list[TensorSpec]:
        """The tensors that training moves: those of rule ``mean``."""
        return [parameter.spec for parameter in self.parameters if parameter.rule == "mean"]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and buffers."""
        return sum(spec.nbytes for spec in self.specs)


def parse_manifest(data: bytes) -> Manifest:
    """Decode and validate ``manifest.json``.

    Raises:
        BundleError: not JSON, an unknown schema, a field missing or out of its range, or names that
            contradict one another.
    """
    try:
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
        if schema != SCHEMA:
            raise BundleError(
                f"the bundle has schema {schema}, this SDK reads schema {SCHEMA}: "
                "install a matching edge-sdk-fl or export the model again"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BundleError(f"manifest.json is not valid: {error}") from None
    _check_consistency(manifest)
    return manifest


class _SchemaOnly(msgspec.Struct):
    schema: int


def _check_consistency(manifest: Manifest) -> None:
    names = [parameter.name for parameter in manifest.parameters]
    if not names or len(names) > MAX_TENSORS or len(set(names)) != len(names):
        raise BundleError(f"manifest.json must name 1 to {MAX_TENSORS} different parameters")
    for parameter in manifest.parameters:
        elements = parameter.spec.nbytes // np.dtype(parameter.dtype).itemsize
        if elements > MAX_ELEMENTS:
            raise BundleError(f"parameter {parameter.name!r} declares {elements} elements, over the limit")
        if (parameter.dtype == "int64") != (parameter.rule == "counter"):
            raise BundleError(f"parameter {parameter.name!r}: rule {parameter.rule} does not fit its dtype")
    if any("/" in name for name in names):
        raise BundleError("manifest.json names a parameter with a '/', by which programs tell inputs apart")
    shapes = {parameter.name: parameter.shape for parameter in manifest.parameters}
    linear = [(manifest.classes, manifest.feature_size), (manifest.classes,)]
    if not manifest.head or [shapes.get(name) for name in manifest.head] != linear[: len(manifest.head)]:
        raise BundleError("manifest.json names a head that is not linear from its features to its classes")
    if manifest.backbone is not None:
        _check_backbone(manifest.backbone, manifest.runtimes)
    if manifest.describe is not None and not {*manifest.describe.programs} <= {*manifest.runtimes}:
        raise BundleError("manifest.json gives a describe program for a runtime that it does not list")
    _check_size(manifest.input)
    channels = manifest.input.shape[0]
    if len(manifest.input.mean) != channels or len(manifest.input.std) != channels:
        raise BundleError(f"manifest.json must give mean and std for {channels} channels")
    if not all(value > 0 for value in manifest.input.std):
        raise BundleError("manifest.json gives a standard deviation that is not above 0")
    if manifest.class_names and len(manifest.class_names) != manifest.classes:
        raise BundleError(f"manifest.json names {len(manifest.class_names)} of {manifest.classes} classes")
    if [noise.name for noise in manifest.noise] != [f"noise{i}" for i in range(len(manifest.noise))]:
        raise BundleError("manifest.json must name its noise inputs noise0, noise1, … in order")
    if (numbers := sum(math.prod(noise.shape) for noise in manifest.noise)) > MAX_NOISE:
        raise BundleError(f"manifest.json wants {numbers} numbers of noise for a sample, over the limit")


def _check_backbone(backbone: Backbone, runtimes: dict[str, Programs]) -> None:
    if backbone.programs.keys() != runtimes.keys():
        raise BundleError("manifest.json must give a backbone for each runtime that it lists, and no other")
    if not 1 <= len(backbone.shape) <= MAX_AXES or math.prod(backbone.shape) > MAX_FEATURES:
        raise BundleError(
            f"manifest.json gives a backbone whose features have {len(backbone.shape)} axes or more than "
            f"{MAX_FEATURES} numbers an image"
        )


def _check_size(input: Input) -> None:
    if 0 in input.shape:
        raise BundleError("manifest.json gives an input without pixels")
    (_, *crop), (_, *size) = input.shape, input.image_shape
    if any(whole < part for whole, part in zip(size, crop, strict=True)):
        raise BundleError(f"manifest.json cuts {crop} pixels out of images of {size}")
    if math.prod(input.image_shape) > MAX_ELEMENTS:
        raise BundleError(f"manifest.json gives images of {list(input.image_shape)}, over the limit")
