"""What runs a bundle's programs on a device. ``Runtime`` is the seam; :func:`open_runtime` picks one."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.manifest import Option
from edge_sdk.tensors import Array, Tensors

__all__ = ["RUNTIMES", "Optimiser", "Runtime", "Sums", "check_runtime", "open_runtime"]


RUNTIMES = {"onnx": "onnxruntime", "executorch": "executorch"}
"""By the names that bundles give them, the modules that runtimes need."""
_NO_CLIPPING = float(np.finfo(np.float32).max)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimiser:
    """Stochastic gradient descent as ``torch.optim.SGD`` has it, without Nesterov momentum.

    What is 0 is off. The last three need a bundle that was exported with the option.

    Args:
        lr: learning rate η.
        weight_decay: L2 coefficient of trainable parameters.
        momentum: of the local velocity, ``momentum``.
        proximal: μ of FedProx (Li et al., arXiv 1812.06127): μ/2 ‖w − w_received‖² is added to the loss,
            ``proximal``.
        clip_norm: largest L2 norm of the whole gradient, before weight decay, ``clipping``.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0
    proximal: float = 0.0
    clip_norm: float = 0.0

    @property
    def longest(self) -> float:
        """``clip_norm`` as programs take it, the largest float32 for none."""
        return min(self.clip_norm or _NO_CLIPPING, _NO_CLIPPING)

    def check(self, available: Collection[Option]) -> None:
        """Raise BundleError if a bundle that was exported with these options cannot do this."""
        if missing := sorted(self.options() - set(available)):
            raise BundleError(f"the bundle was exported without the option {missing[0]}: export it again")

    def options(self) -> set[Option]:
        """The options that a bundle must have for this."""
        wanted: dict[Option, float] = {
            "momentum": self.momentum,
            "proximal": self.proximal,
            "clipping": self.clip_norm,
        }
        return {option for option, value in wanted.items() if value}


class Runtime(Protocol):
    """A bundle's programs with one set of weights, which stay in the runtime's memory between steps."""

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy in all weights and buffers, at which a round begins: the proximal term pulls towards them,
        and the local velocity is 0."""

    def go_on(self, weights: Mapping[str, Array]) -> None:
        """Copy in what training has come to since :meth:`set_weights`, to which the proximal term still
        pulls; the velocity stays too."""

    def get_weights(self) -> Tensors:
        """Copy out all weights and buffers."""

    def set_velocity(self, velocity: Mapping[str, Array]) -> None:
        """Copy in the local velocity, one float32 tensor for each trainable parameter."""

    def get_velocity(self) -> Tensors:
        """Copy out the local velocity; empty for a bundle without ``momentum``."""

    def train_step(
        self, x: Array, y: Array, sample_weight: Array, optimiser: Optimiser, noise: Sequence[Array] = ()
    ) -> Sums:
        """One optimiser step on ``x`` float32 [B, *entering], ``y`` int64 [B] and weights float32 [B]."""

    def evaluate(self, x: Array, y: Array) -> Sums:
        """Loss and correct predictions of the current weights, in evaluation mode."""

    def predict(self, x: Array) -> Array:
        """Logits float32 [B, classes] of the current weights."""

    def embed(self, x: Array) -> Array:
        """Penultimate features float32 [B, feature_size] of the current weights."""

    def backbone(self, images: Array) -> Array:
        """What the bundle's frozen backbone makes of prepared images, float32 [B, C, H, W].

        That is the ``x`` of all else; :mod:`edge_sdk.examples` holds its shape against the manifest.

        Raises:
            BundleError: the bundle has no backbone.
        """


def open_runtime(
    bundle: Bundle, name: str = "onnx", *, threads: int = 0, providers: Sequence[str] | None = None
) -> Runtime:
    """Open ``bundle`` in the runtime called ``name``.

    Args:
        bundle: where the programs and the first weights come from.
        name: ``onnx`` or ``executorch``.
        threads: threads for one operator; 0 takes one for each physical core. ExecuTorch has one pool of them
            for the whole process.
        providers: ONNX Runtime's execution providers in order of preference; the CPU by default.

    Raises:
        RuntimeUnavailableError: the runtime or a provider is not installed.
        BundleError: the bundle was not exported for that runtime.
    """
    check_runtime(name, providers)
    if name == "executorch":
        from edge_sdk.runtime.executorch import ExecutorchRuntime

        return ExecutorchRuntime(bundle, threads=threads)
    from edge_sdk.runtime.onnx import OnnxRuntime

    return OnnxRuntime(bundle, threads=threads, providers=providers)


def check_runtime(name: str, providers: Sequence[str] | None = None) -> None:
    """Raise RuntimeUnavailableError if there is no such runtime here, or none that has ``providers``."""
    if name not in RUNTIMES:
        raise RuntimeUnavailableError(f"there is no runtime {name!r}: take {' or '.join(RUNTIMES)}")
    module = RUNTIMES[name]
    if importlib.util.find_spec(module) is None:
        raise RuntimeUnavailableError(f"{module} is not installed: pip install 'edge-sdk-fl[{name}]'")
    if providers and name != "onnx":
        raise RuntimeUnavailableError(f"execution providers are ONNX Runtime's: {name} has none")
