"""What runs a bundle's programs on a device. ``Runtime`` is the seam; :func:`open_runtime` picks one."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from edge_sdk.bundle import Bundle
from edge_sdk.errors import RuntimeUnavailableError
from edge_sdk.tensors import Array, Tensors

__all__ = ["Runtime", "Sums", "open_runtime"]


class Sums(NamedTuple):
    """Sums over examples, which add up over batches and devices where means would not."""

    loss: float
    correct: int
    examples: int

    def __add__(self, other: object) -> Sums:
        """Add field by field."""
        if not isinstance(other, Sums):
            return NotImplemented
        return Sums(self.loss + other.loss, self.correct + other.correct, self.examples + other.examples)


class Runtime(Protocol):
    """A bundle's programs with one set of weights, which stay in the runtime's memory between steps."""

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy in all weights and buffers; names, shapes and dtypes are those of the manifest."""

    def get_weights(self) -> Tensors:
        """Copy out all weights and buffers."""

    def train_step(
        self,
        x: Array,
        y: Array,
        sample_weight: Array,
        *,
        lr: float,
        weight_decay: float,
        noise: Sequence[Array] = (),
    ) -> Sums:
        """One optimiser step on a batch ``x`` float32 [B, C, H, W], ``y`` int64 [B], weights float32 [B]."""

    def evaluate(self, x: Array, y: Array) -> Sums:
        """Loss and correct predictions of the current weights, in evaluation mode."""

    def predict(self, x: Array) -> Array:
        """Logits float32 [B, classes] of the current weights."""

    def embed(self, x: Array) -> Array:
        """Penultimate features float32 [B, feature_size] of the current weights."""


def open_runtime(
    bundle: Bundle, name: str = "onnx", *, threads: int = 0, providers: Sequence[str] | None = None
) -> Runtime:
    """Open ``bundle`` in the runtime called ``name``.

    Args:
        bundle: where the programs and the first weights come from.
        name: ``onnx``.
        threads: threads for one operator; 0 takes one for each physical core.
        providers: ONNX Runtime's execution providers in order of preference; the CPU by default.

    Raises:
        RuntimeUnavailableError: the runtime or a provider is not installed.
        BundleError: the bundle was not exported for that runtime.
    """
    if name != "onnx":
        raise RuntimeUnavailableError(f"runtime {name!r} is not available in this version: use onnx")
    if importlib.util.find_spec("onnxruntime") is None:
        raise RuntimeUnavailableError("onnxruntime is not installed: pip install 'edge-sdk-fl[onnx]'")
    from edge_sdk.runtime.onnx import OnnxRuntime

    return OnnxRuntime(bundle, threads=threads, providers=providers)
