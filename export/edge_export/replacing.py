"""Functions of PyTorch that are computed in another way within a context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode


class Replacing(TorchFunctionMode):
    """A context in which every call of a function goes to its :meth:`replacement`."""

    def replacement(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of ``function``; itself where nothing is."""
        raise NotImplementedError

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.replacement(function)(*args, **(kwargs or {}))
