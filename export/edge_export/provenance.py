"""Where in a model an operator comes from: what turns a tracer's error into one that names a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from edge_export.classifier import Classifier


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[str]]:
    """Within this context the list given holds the paths of the modules being run, the innermost last.

    After an error it still holds the module that raised it.
    """
    stack: list[str] = []
    hooks = []
    for path, module in model.named_modules():
        if path:
            hooks.append(module.register_forward_pre_hook(lambda *_, path=path: stack.append(path)))
            hooks.append(module.register_forward_hook(lambda *_: stack.pop() and None))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


def module_of(classifier: Classifier, operator: str) -> str | None:
    """Path of the first module that runs ``operator`` (``aten.gelu_backward``) or what it differentiates."""
    with running_modules(classifier.model) as stack, _Origins(stack) as origins, torch.no_grad():
        classifier.model.train()(torch.zeros(2, *classifier.input_shape))
    name = operator.split(".")[1]
    sources = [source for source in origins.first if name.startswith(source.rstrip("_"))]
    return origins.first[max(sources, key=len)] if sources else None


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, stack: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stack = stack
        self.first: dict[str, str] = {}

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._stack:
            self.first.setdefault(function._schema.name.split("::")[1], self._stack[-1])
        call: Callable[..., Any] = function
        return call(*args, **(kwargs or {}))
