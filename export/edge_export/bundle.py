"""A bundle made from a PyTorch model: examined, lowered, verified, packed."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from edge_export.backbone import backbone_members
from edge_export.classifier import Classifier, examine, rule_of
from edge_export.describe import DescriberSettings, describe_members
from edge_export.errors import ExportError
from edge_export.progress import progress
from edge_export.runtimes import Exported, for_executorch, for_onnx
from edge_export.split import split
from edge_sdk.bundle import Bundle
from edge_sdk.data import as_dataset, prepare
from edge_sdk.manifest import MAX_CLASSES, Input, Manifest, Noise, Option, Parameter, Pipeline
from edge_sdk.runtime import RUNTIMES
from edge_sdk.tensors import Array

CALIBRATION = 256
"""Images from which the ranges of int8 are found; more of them change next to nothing."""


def export_bundle(
    model: nn.Module,
    example_input: Tensor | tuple[int, int, int],
    *,
    classes: int | None = None,
    name: str | None = None,
    class_names: Sequence[str] = (),
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    pipeline: Pipeline | None = None,
    options: Collection[Option] = (),
    head_only: str | None = None,
    calibration: object = None,
    describe: DescriberSettings | None = None,
    runtimes: Collection[str] = ("onnx",),
    batch: int = 32,
    seed: int = 0,
) -> Bundle:
    """Turn an image classifier into a bundle that devices train without PyTorch.

    Use it on any ``nn.Module`` whose last layer is an ``nn.Linear`` that gives the logits. The module is
    copied, not changed, and its mode does not matter: the train program runs in train mode, the others
    in eval mode. Parameters with ``requires_grad=False`` stay as they are; they travel as statistics,
    which are averaged without momentum, so that they keep their value. The train program is then run
    against PyTorch in float64 (:mod:`edge_export.verify`).

    Args:
        model: float32; gives logits [B, classes] for images [B, C, H, W].
        example_input: float32 images [B, C, H, W], one image [C, H, W], or the shape (C, H, W), as
            they enter the model.
        classes: number of classes, to be checked against the model's; None takes the model's.
        name: of the bundle; None takes the class name of the model.
        class_names: one for each class, or none.
        mean: for each channel, taken off an image scaled to [0, 1]; None is 0.
        std: for each channel, above 0; an image is divided by it after that. None is 1.
        pipeline: the size of the data set's images where they are larger than the model's, random crops and
            flips in training, and whether each image is standardised. None is for images of the model's size.
        options: what the train program can do beyond SGD with weight decay: ``momentum`` of its own on
            each device, a ``proximal`` term, ``clipping`` of the gradient. Each takes inputs and time.
        head_only: path of the submodule that devices train, ``classifier`` say, which gives the logits. All
            before it is frozen: devices compute its features once a round, and updates hold the head alone.
            None lets them train the whole model.
        calibration: with ``head_only``, examples like the devices' (what :func:`edge_sdk.data.as_dataset`
            takes; labels do not matter), of which up to 256 give the ranges for a frozen part of eight bits.
            None leaves it float32.
        describe: what lets devices be grouped by their data: some 9 MB of MobileNetV2. None leaves it out.
        runtimes: ``onnx``, ``executorch``, or both: then a fleet may mix them. Servers evaluate with ONNX.
        batch: the most examples that ExecuTorch's programs take in a step; smaller batches cost as much.
        seed: of the random batches of the verification, and of the draw of the images for calibration.

    Returns:
        The bundle. The same model gives the same bytes.

    Raises:
        ExportError: the model is not a classifier of the kind described, or does something that the
            programs cannot; the message names the module and the operator where they are known. Or
            ``describe`` cannot be had: see :func:`edge_export.describe.describe_members`. Or the model does
            not end in ``head_only``, or what int8 takes is not installed.
        DataError: the examples for calibration do not fit the model.
    """
    shape = _image_shape(example_input)
    parts = split(model, head_only, shape) if head_only is not None else None
    classifier = examine(model, shape) if parts is None else examine(parts.head, parts.shape)
    if classes is not None and classes != classifier.classes:
        raise ExportError(
            f"the model gives {classifier.classes} logits, not one for each of {classes} classes"
        )
    if class_names and len(class_names) != classifier.classes:
        raise ExportError(f"class_names holds {len(class_names)} names for {classifier.classes} classes")
    images = _input(shape, mean, std, pipeline)
    if unknown := sorted(set(options) - set(get_args(Option))):
        raise ExportError(f"there is no option {unknown[0]!r}: take of {', '.join(get_args(Option))}")
    options = tuple(option for option in get_args(Option) if option in options)

    if not runtimes or not set(runtimes) <= set(RUNTIMES):
        raise ExportError(f"runtimes {', '.join(runtimes) or '(none)'}: take of {', '.join(RUNTIMES)}")
    if describe is not None:
        progress.info("what describes data")
    described, describer = (
        (None, {}) if describe is None else describe_members(describe, images.image_shape, runtimes)
    )
    backbone, frozen = None, dict[str, bytes]()
    if parts is not None:
        progress.info("the frozen part, in %s", "float32" if calibration is None else "int8")
        examples = None if calibration is None else _calibrating(calibration, images, seed)
        backbone, frozen = backbone_members(parts, shape, runtimes, calibration=examples, seed=seed)
    elif calibration is not None:
        raise ExportError("calibration is for a frozen part: give head_only too")
    made: dict[str, Exported] = {}
    if "onnx" in runtimes:
        made["onnx"] = for_onnx(classifier, options, seed)
    if "executorch" in runtimes:
        made["executorch"] = for_executorch(classifier, options, seed, batch)
    manifest = Manifest(
        name=name if name is not None else type(model).__name__,
        input=images,
        classes=classifier.classes,
        class_names=tuple(class_names),
        parameters=_parameters(classifier),
        head=classifier.head_names,
        feature_size=classifier.feature_size,
        noise=tuple(Noise(f"noise{i}", shape) for i, shape in enumerate(classifier.noise_shapes)),
        options=options,
        runtimes={runtime: named for runtime, (named, _) in made.items()},
        backbone=backbone,
        describe=described,
    )
    weights = {name: tensor.numpy() for name, tensor in classifier.state.items()}
    members = {name: data for _, members in made.values() for name, data in members.items()}
    return Bundle.build(manifest, weights, members | frozen | describer)


def _calibrating(examples: object, input: Input, seed: int) -> Array:
    """Images as they enter the model, float32 [n, C, H, W]; drawn, where there are more than it takes."""
    dataset = as_dataset(examples)
    chosen = np.random.default_rng(seed).permutation(len(dataset))[:CALIBRATION]
    images, _ = prepare(dataset, np.sort(chosen), input, MAX_CLASSES)
    return images


def _parameters(classifier: Classifier) -> tuple[Parameter, ...]:
    trainable = classifier.trainable
    return tuple(
        Parameter(
            name,
            tuple(tensor.shape),
            "int64" if tensor.dtype == torch.int64 else "float32",
            rule_of(tensor, name in trainable),
        )
        for name, tensor in classifier.state.items()
    )


def _image_shape(example: Tensor | tuple[int, int, int]) -> tuple[int, int, int]:
    if isinstance(example, Tensor) and example.dtype != torch.float32:
        raise ExportError(f"the example input is {example.dtype}: images enter a model as float32")
    sizes = tuple(example.shape) if isinstance(example, Tensor) else tuple(example)
    if isinstance(example, Tensor) and len(sizes) == 4:
        sizes = sizes[1:]
    if len(sizes) != 3 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ExportError(f"the example input {list(sizes)} is not an image: give (C, H, W), each above 0")
    channels, height, width = sizes
    return channels, height, width


def _input(
    shape: tuple[int, int, int],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    pipeline: Pipeline | None,
) -> Input:
    channels, *crop = shape
    deviations = _per_channel("std", std, channels, 1.0)
    if not all(value > 0 for value in deviations):
        raise ExportError("std must be above 0 for every channel")
    if pipeline is not None and any(map(operator.lt, pipeline.size, crop)):
        raise ExportError(f"{crop} pixels cannot be cut out of images of {list(pipeline.size)}")
    return Input(shape, _per_channel("mean", mean, channels, 0.0), deviations, pipeline)


def _per_channel(
    what: str, values: Sequence[float] | None, channels: int, default: float
) -> tuple[float, ...]:
    if values is None:
        return (default,) * channels
    if len(values) != channels:
        raise ExportError(f"{what} holds {len(values)} values for {channels} channels")
    return tuple(float(value) for value in values)
