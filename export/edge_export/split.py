"""A model in two: the head that devices train, and all that an image goes through before it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from edge_export.classifier import check_logits, first_line, private_copy
from edge_export.errors import ExportError


class Split(NamedTuple):
    """Private copies of the two parts, in eval mode.

    Attributes:
        backbone: from images to what enters the head.
        head: from there to the logits; its parameters have the names that they have in the whole model.
        shape: of what enters the head of one image.
    """

    backbone: nn.Module
    head: nn.Module
    shape: tuple[int, ...]


def split(model: nn.Module, path: str, input_shape: tuple[int, int, int]) -> Split:
    """Part ``model`` where its submodule ``path`` begins.

    Args:
        model: gives logits [B, classes] for float32 images; not changed.
        path: of the head, ``classifier`` say. It runs once, takes one tensor [B, …] and gives the logits.
        input_shape: (C, H, W) of one image.

    Raises:
        ExportError: there is no such module, it is not the model's end, or the model cannot be copied or run.
    """
    if not path:
        raise ExportError("head_only names the whole model: leave it out to train all of it")
    model = private_copy(model).eval()
    try:
        head = model.get_submodule(path)
    except AttributeError:
        known = ", ".join(name for name, _ in model.named_children()) or "no modules"
        raise ExportError(f"head_only: the model has no module {path!r}, but {known}") from None
    x = torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0))
    entering, logits = _entering(model, head, path, x)
    before = _Before(model, path, logits.shape[1])
    try:
        with torch.no_grad():
            before(x)
    except Exception as error:  # whatever a user's forward may raise
        raise ExportError(f"{path}: the model looks into its head ({first_line(error)})") from error
    return Split(before, _Head(path, head), tuple(entering.shape[1:]))


def _entering(model: nn.Module, head: nn.Module, path: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """What enters the head, and the logits."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        calls.append((args, given, output))

    hook = head.register_forward_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            logits = model(x)
    except Exception as error:  # whatever a user's forward may raise
        shape = "x".join(map(str, x.shape[1:]))
        raise ExportError(f"the model does not run on a {shape} input ({first_line(error)})") from error
    finally:
        hook.remove()
    check_logits(logits, len(x))
    if len(calls) != 1:
        raise ExportError(f"{path}: the head must run once in a forward pass, it runs {len(calls)} times")
    args, given, output = calls[0]
    if len(args) != 1 or given or not isinstance(args[0], Tensor):
        raise ExportError(f"{path}: the head must take one tensor [B, …] and nothing else")
    if args[0].dtype != torch.float32 or args[0].dim() < 2 or len(args[0]) != len(x):
        found = f"{args[0].dtype} {list(args[0].shape)}"
        raise ExportError(f"{path}: the head takes {found} for {len(x)} images, not float32 [B, …]")
    if not isinstance(output, Tensor) or output.shape != logits.shape or not torch.equal(output, logits):
        raise ExportError(f"{path}: something follows the head: what it gives must be the logits")
    return args[0], logits


class _Before(nn.Module):
    """What a model makes of images until they enter one of its modules, which gives nothing here."""

    def __init__(self, model: nn.Module, path: str, classes: int) -> None:
        super().__init__()
        model.set_submodule(path, _Nothing(classes))
        self.model, self.path = model, path

    def forward(self, x: Tensor) -> Tensor:
        entering: list[Tensor] = []
        hook = self.model.get_submodule(self.path).register_forward_pre_hook(
            lambda _, args: entering.append(args[0])
        )
        try:
            self.model(x)
        finally:
            hook.remove()
        (features,) = entering
        return features


class _Nothing(nn.Module):
    """Logits of 0, so that what a model does after its head costs nothing."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self.classes)


class _Head(nn.Module):
    """A module alone, under the path that it has in the whole."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        name, _, rest = path.partition(".")
        self.add_module(name, _Head(rest, module) if rest else module)

    def forward(self, x: Tensor) -> Any:
        (module,) = self.children()
        # It may begin in place, and these features are used again.
        return module(x.clone())
