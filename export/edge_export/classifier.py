"""What an export has to know of a model, and the models that it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from edge_export.errors import ExportError
from edge_export.layers import ExplicitDropout
from edge_export.training_step import Tensors

COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Classifier:
    """A private copy of a user's model, known to be a classifier that can be exported.

    Attributes:
        model: the copy; its mode is set by whoever runs it.
        input_shape: of one example: (C, H, W) of an image, or what enters the head where that is the model.
        classes: number of logits.
        head: module path of the last linear layer, whose output is the logits.
        feature_size: extent of what enters it.
        noise_shapes: for each dropout layer in order of execution, the noise that one sample takes.
    """

    model: nn.Module
    input_shape: tuple[int, ...]
    classes: int
    head: str
    feature_size: int
    noise_shapes: tuple[tuple[int, ...], ...]

    @property
    def state(self) -> Tensors:
        """All parameters and buffers by name, parameters first, as the model defines them."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named}

    @property
    def trainable(self) -> set[str]:
        """Names of the parameters that a step changes."""
        return {name for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def head_names(self) -> tuple[str, ...]:
        """Names of the head's weight and, where it has one, bias."""
        prefix = f"{self.head}." if self.head else ""
        return tuple(f"{prefix}{name}" for name, _ in self.model.get_submodule(self.head).named_parameters())

    @contextmanager
    def head_input(self) -> Iterator[list[Tensor]]:
        """Within this context the features that enter the head are appended to the list given."""
        seen: list[Tensor] = []
        hook = self.model.get_submodule(self.head).register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        )
        try:
            yield seen
        finally:
            hook.remove()


def examine(model: nn.Module, input_shape: tuple[int, ...]) -> Classifier:
    """Copy ``model`` and find out what an export needs to know.

    Args:
        model: a classifier for float32 images, or for other examples of one shape; not changed.
        input_shape: (C, H, W), or that shape.

    Raises:
        ExportError: the model is not one that can be exported, or cannot be copied or run.
    """
    model = private_copy(model)
    _check_state(model)
    _check_modules(model)
    x = torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0))
    logits, head, features = _find_head(model.eval(), x)
    return Classifier(model, input_shape, logits.shape[1], head, features.shape[1], _noise_shapes(model, x))


def private_copy(model: nn.Module) -> nn.Module:
    """A copy to work on; ExportError if the model cannot be copied."""
    try:
        return copy.deepcopy(model).cpu()
    except Exception as error:  # whatever a user's __deepcopy__ or a non-leaf attribute may raise
        raise ExportError(f"the model cannot be copied ({first_line(error)})") from error


def rule_of(tensor: Tensor, trainable: bool) -> Literal["mean", "statistic", "counter"]:
    """The rule of aggregation: a frozen parameter is a statistic, which no step changes."""
    if tensor.dtype == torch.int64:
        return "counter"
    return "mean" if trainable else "statistic"


def _check_state(model: nn.Module) -> None:
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first_name:
            raise ExportError(
                f"{first_name[id(parameter)]} and {name} are one parameter under two names: "
                "give each module its own"
            )
        first_name[id(parameter)] = name
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ExportError("the model has no parameter with requires_grad=True: there is nothing to train")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "/" in name:
            raise ExportError(f"{name!r} holds a '/', which separates names in a bundle: rename the module")
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ExportError(
                f"{name} is {_dtype(tensor)}: call model.float() first, devices train in float32"
            )
        counter = tensor.dtype == torch.int64 and name.split(".")[-1] == COUNTER
        if not tensor.is_floating_point() and not counter:
            raise ExportError(
                f"{name} is a buffer of dtype {_dtype(tensor)}, for which there is no rule of aggregation: "
                "make it a plain attribute or float32"
            )


def _check_modules(model: nn.Module) -> None:
    for path, module in model.named_modules():
        where = path or type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            raise ExportError(
                f"{where}: BatchNorm with momentum=None averages over all batches "
                "seen, which devices cannot share: give it a number, 0.1 say"
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ExportError(
                f"{where}: BatchNorm without running statistics predicts an image by "
                "the others of its batch: give it track_running_stats=True"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.running_mean is not None:
            raise ExportError(
                f"{where}: InstanceNorm with running statistics is not covered: give "
                "it track_running_stats=False"
            )
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise ExportError(f"{where}: {type(module).__name__} is not covered: use nn.Dropout")
        if isinstance(module, nn.MultiheadAttention) and module.dropout:
            raise ExportError(f"{path}: attention with dropout is not covered: give it dropout=0")
        if isinstance(module, (nn.Conv3d, nn.ConvTranspose3d)) and module.weight.requires_grad:
            raise ExportError(
                f"{where}: training a convolution over 3 axes (aten.convolution) "
                "is not covered: use nn.Conv2d"
            )
        if isinstance(module, nn.RNNBase):
            raise ExportError(f"{path}: {type(module).__name__} is not covered, only layers for images are")


def _find_head(model: nn.Module, x: Tensor) -> tuple[Tensor, str, Tensor]:
    calls: list[tuple[str, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, args, output, path=path: calls.append((path, args[0], output)))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad():
            logits = model(x)
    except ExportError:
        raise
    except Exception as error:  # whatever a user's forward may raise
        shape = "x".join(map(str, x.shape[1:]))
        raise ExportError(f"the model does not run on a {shape} input ({first_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
    check_logits(logits, len(x))
    needed = "the last layer must be an nn.Linear that gives the logits, since CCVR re-trains it"
    if not calls:
        raise ExportError(f"the model has no nn.Linear: {needed}")
    path, features, output = calls[-1]
    if output.shape != logits.shape or not torch.equal(output, logits):
        raise ExportError(f"{path}: something follows the last nn.Linear (a softmax?): {needed}")
    if features.dim() != 2 or sum(call[0] == path for call in calls) != 1:
        raise ExportError(f"{path}: the last nn.Linear must run once, on features [B, F]")
    return logits, path, features


def check_logits(logits: object, batch: int) -> None:
    """Raise ExportError if a model's output for ``batch`` images is none of a classifier's."""
    if not isinstance(logits, Tensor):
        raise ExportError(
            f"the model returns a {type(logits).__name__}, not one tensor of logits [B, classes]"
        )
    if logits.dim() != 2 or logits.shape[0] != batch or logits.shape[1] < 2:
        raise ExportError(
            f"the model returns {list(logits.shape)} for {batch} images: a classifier returns "
            "[B, classes], of 2 classes or more"
        )


def _noise_shapes(model: nn.Module, x: Tensor) -> tuple[tuple[int, ...], ...]:
    shapes: list[tuple[int, ...]] = []

    def draw(shape: tuple[int, ...]) -> Tensor:
        shapes.append(shape)
        return torch.ones(len(x), *shape)

    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    try:
        with torch.no_grad(), ExplicitDropout(draw):
            model(x)
    except Exception as error:  # whatever a user's forward may raise in train mode alone
        raise ExportError(f"the model does not run in train mode ({first_line(error)})") from error
    finally:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return tuple(shapes)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """What an error says first, for an error of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
