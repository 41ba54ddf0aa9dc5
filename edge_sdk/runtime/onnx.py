"""Training, evaluation and prediction on any stock ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.runtime import Optimiser, Sums
from edge_sdk.runtime.signature import BATCH, Signature, frozen_signature, signature
from edge_sdk.tensors import Array, Tensors, TensorSpec, check

_DTYPES = {"tensor(float)": "float32", "tensor(int64)": "int64"}


class OnnxRuntime:
    """One bundle in ONNX Runtime; see :class:`edge_sdk.runtime.Runtime`.

    Weights stay in the runtime's memory: a training step reads one set of buffers and writes the other,
    then the two change places. An output is never bound to its own input, which would corrupt gradients.

    Args:
        bundle: exported for ``onnx``; its weights are the first ones.
        threads: threads for one operator; 0 takes one for each physical core.
        providers: execution providers in order of preference; the CPU by default.

    Raises:
        RuntimeUnavailableError: a provider is not part of the installed ONNX Runtime.
        BundleError: the bundle holds no ONNX programs; at its first use, a program that is no ONNX, or not
            the one that the manifest tells of.
    """

    def __init__(self, bundle: Bundle, *, threads: int = 0, providers: Sequence[str] | None = None) -> None:
        self._bundle = bundle
        self._specs = bundle.manifest.specs
        self._providers = _check_providers(providers)
        self._threads = threads
        self._sessions = lru_cache(maxsize=None)(self._open)
        self._options = bundle.manifest.options
        self._trainable = bundle.manifest.trainable
        self._weights = _zeros(self._specs)
        self._velocity = _zeros(self._trainable if "momentum" in self._options else [])
        self._anchor = _zeros(self._trainable if "proximal" in self._options else [])
        self._steps: list[_Step] = []
        self.set_weights(bundle.weights)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy in all weights and buffers.

        Raises:
            TensorError: they are not those that the manifest declares.
        """
        self.go_on(weights)
        _fill(self._anchor, weights)
        for value in self._velocity.values():
            value.update_inplace(np.zeros(value.shape(), np.float32))

    def go_on(self, weights: Mapping[str, Array]) -> None:
        """Copy in what training has come to; the proximal term pulls to where it began; the velocity stays.

        Raises:
            TensorError: they are not those that the manifest declares.
        """
        check(weights, self._specs)
        _fill(self._weights, weights)

    def get_weights(self) -> Tensors:
        """Copy out all weights and buffers."""
        return {name: np.array(value.numpy()) for name, value in self._weights.items()}

    def set_velocity(self, velocity: Mapping[str, Array]) -> None:
        """Copy in the local velocity.

        Raises:
            TensorError: it is not one tensor for each trainable parameter.
        """
        check(velocity, self._trainable)
        _fill(self._velocity, velocity)

    def get_velocity(self) -> Tensors:
        """Copy out the local velocity; empty for a bundle without ``momentum``."""
        return {name: np.array(value.numpy()) for name, value in self._velocity.items()}

    def train_step(
        self, x: Array, y: Array, sample_weight: Array, optimiser: Optimiser, noise: Sequence[Array] = ()
    ) -> Sums:
        """One optimiser step; see :class:`edge_sdk.runtime.Runtime`.

        Raises:
            BundleError: the bundle was exported without an option that ``optimiser`` needs.
        """
        optimiser.check(self._options)
        step, following = self._steps or self._bind_steps()
        feed = {"x": x, "y": y, "sample_weight": sample_weight}
        step.run(feed | {f"noise{i}": drawn for i, drawn in enumerate(noise)}, optimiser)
        self._weights, self._velocity = step.weights, step.velocity
        self._steps = [following, step]
        return Sums(*step.sums(), int(np.count_nonzero(sample_weight)))

    def _bind_steps(self) -> list[_Step]:
        here = (self._weights, self._velocity)
        spare = (_zeros(self._specs), _zeros(self._trainable if self._velocity else []))
        session = self._sessions("train")
        return [
            _Step(session, *source, *target, self._anchor)
            for source, target in ((here, spare), (spare, here))
        ]

    def evaluate(self, x: Array, y: Array) -> Sums:
        """Loss and correct predictions of the current weights, in evaluation mode."""
        feed = {"x": x, "y": y, "sample_weight": np.ones(len(y), np.float32)}
        outputs = self._run("evaluate", feed)
        return Sums(float(outputs["loss_sum"]), int(outputs["correct"]), len(y))

    def predict(self, x: Array) -> Array:
        """Logits float32 [B, classes] of the current weights."""
        return self._run("predict", {"x": x})["logits"]

    def embed(self, x: Array) -> Array:
        """Penultimate features float32 [B, feature_size] of the current weights."""
        return self._run("embed", {"x": x})["features"]

    def backbone(self, images: Array) -> Array:
        """Features of prepared images; see :class:`edge_sdk.runtime.Runtime`."""
        return self._backbone(images)

    @cached_property
    def _backbone(self) -> Callable[[Array], Array]:
        program, manifest = self._bundle.backbone("onnx"), self._bundle.manifest
        shapes = manifest.input.shape, manifest.entering
        return open_frozen(program, "backbone", *shapes, threads=self._threads, providers=self._providers)

    def _run(self, method: str, feed: Mapping[str, Array]) -> Tensors:
        session = self._sessions(method)
        binding = session.io_binding()
        values = {f"weights/{name}": value for name, value in self._weights.items()} | _values(feed)
        for name in (node.name for node in session.get_inputs()):
            binding.bind_ortvalue_input(name, values[name])
        names = [output.name for output in session.get_outputs()]
        for name in names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        return dict(zip(names, (np.array(v.numpy()) for v in binding.get_outputs()), strict=True))

    def _open(self, method: str) -> Any:
        # The level above re-orders maps in memory for convolutions with constant weights. Ours are inputs,
        # so that it would re-order around poolings alone, which takes longer than the poolings.
        level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        program = self._bundle.program("onnx", method)
        session = _session(program, method, level, self._threads, self._providers)
        signature(self._bundle.manifest, method).check(method, _signature(session))
        return session


def open_frozen(
    program: bytes,
    method: str,
    takes: tuple[int, ...],
    gives: tuple[int, ...],
    *,
    threads: int = 0,
    providers: Sequence[str] | None = None,
) -> Callable[[Array], Array]:
    """A program that holds its own weights (``describe``, ``backbone``): from ``x`` to its one output.

    Args:
        program: the ONNX file.
        method: by which errors call it.
        takes: shape of one image.
        gives: shape of its features.
        threads: threads for one operator; 0 takes one for each physical core.
        providers: execution providers in order of preference; the CPU by default.

    Raises:
        RuntimeUnavailableError: a provider is not part of the installed ONNX Runtime.
        BundleError: the program is no ONNX, or has other inputs or outputs.
    """
    level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = _session(program, method, level, threads, _check_providers(providers))
    frozen_signature(takes, gives).check(method, _signature(session))

    def run(x: Array) -> Array:
        output: Array = session.run(None, {"x": x})[0]
        return output

    return run


class _Step:
    """The train program with its memory bound once: from one set of weights and velocity to the other."""

    def __init__(
        self,
        session: Any,
        weights: Mapping[str, Any],
        velocity: Mapping[str, Any],
        new_weights: dict[str, Any],
        new_velocity: dict[str, Any],
        anchor: Mapping[str, Any],
    ) -> None:
        self.weights, self.velocity = new_weights, new_velocity
        self._session, self._binding = session, session.io_binding()
        self._inputs = {node.name for node in session.get_inputs()}
        self._rates = _values(dict.fromkeys(("lr", "weight_decay", "momentum", "proximal", "clip_norm"), 0.0))
        self._loss_sum, self._correct = _value(np.zeros((), np.float32)), _value(np.zeros((), np.int64))
        self._batch: dict[str, Any] = {}
        for group, values in (("weights", weights), ("velocity", velocity), ("anchor", anchor)):
            self._bind({f"{group}/{name}": value for name, value in values.items()})
        self._bind(self._rates)
        for group, values in (("new", new_weights), ("new_velocity", new_velocity)):
            for name, value in values.items():
                self._binding.bind_ortvalue_output(f"{group}/{name}", value)
        self._binding.bind_ortvalue_output("loss_sum", self._loss_sum)
        self._binding.bind_ortvalue_output("correct", self._correct)

    def run(self, batch: Mapping[str, Array], optimiser: Optimiser) -> None:
        """One step on ``batch``, arrays by the names of the program's inputs."""
        for name in ("lr", "weight_decay", "momentum", "proximal"):
            self._rates[name].update_inplace(np.array(getattr(optimiser, name), np.float32))
        self._rates["clip_norm"].update_inplace(np.array(optimiser.longest, np.float32))
        self._batch = _values(batch)  # kept, because the binding does not keep the arrays' memory
        self._bind(self._batch)
        self._session.run_with_iobinding(self._binding)

    def sums(self) -> tuple[float, int]:
        """Loss and correct predictions of the batch that was run last."""
        return float(self._loss_sum.numpy()), int(self._correct.numpy())

    def _bind(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in self._inputs:
                self._binding.bind_ortvalue_input(name, value)


def _session(program: bytes, method: str, level: Any, threads: int, providers: Sequence[str]) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = level
    if not _adds_eight_bits_exactly():
        options.add_session_config_entry("session.x64quantprecision", "1")
    # Worker threads that spin after a run would burn a phone's battery between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(program, options, providers=list(providers))
    except Exception as error:  # ONNX Runtime's own have no common base
        reason = str(error).partition("\n")[0]
        raise BundleError(
            f"the bundle's {method} program is none that ONNX Runtime can open: export it again ({reason})"
        ) from None


@cache
def _adds_eight_bits_exactly() -> bool:
    """Whether the processor says that it has VNNI. On an x86 without, pairs of products overflow unless ONNX
    Runtime is told to take its slower kernels; elsewhere it makes no difference."""
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False


def _signature(session: Any) -> Signature:
    return Signature(_specs(session.get_inputs()), _specs(session.get_outputs()))


def _specs(nodes: Iterable[Any]) -> list[TensorSpec]:
    return [
        TensorSpec(
            node.name,
            tuple(extent if isinstance(extent, int) else BATCH for extent in node.shape),
            _DTYPES.get(node.type, node.type),
        )
        for node in nodes
    ]


def _value(array: Array) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(array)


def _values(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _value(np.array(a, np.float32) if isinstance(a, float) else np.ascontiguousarray(a))
        for name, a in arrays.items()
    }


def _zeros(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {spec.name: _value(np.zeros(spec.shape, spec.dtype)) for spec in specs}


def _fill(values: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    for name, value in values.items():
        value.update_inplace(np.ascontiguousarray(tensors[name]).reshape(value.shape()))


def _check_providers(providers: Sequence[str] | None) -> Sequence[str]:
    available = ort.get_available_providers()
    for provider in providers or ():
        if provider not in available:
            raise RuntimeUnavailableError(
                f"execution provider {provider} is not in this ONNX Runtime, which has {', '.join(available)}"
            )
    return providers or ("CPUExecutionProvider",)
