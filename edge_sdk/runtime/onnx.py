"""Training, evaluation and prediction on any stock ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime as ort

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.runtime import Optimiser, Sums
from edge_sdk.tensors import Array, Tensors, TensorSpec, check


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
        BundleError: the bundle holds no ONNX programs.
    """

    def __init__(self, bundle: Bundle, *, threads: int = 0, providers: Sequence[str] | None = None) -> None:
        self._bundle = bundle
        self._specs = bundle.manifest.specs
        self._providers = _check_providers(providers)
        self._threads = threads
        self._sessions = lru_cache(maxsize=None)(self._open)
        self._options = bundle.manifest.options
        self._trainable = bundle.manifest.trainable
        self._spare: dict[str, Any] = {}
        self._anchor: dict[str, Any] = {}
        self._velocity: dict[str, Any] = {}
        self._spare_velocity: dict[str, Any] = {}
        self.set_weights(bundle.weights)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy in all weights and buffers.

        Raises:
            TensorError: they are not those that the manifest declares.
        """
        check(weights, self._specs)
        self._weights = _values(self._specs, weights)
        if "proximal" in self._options:
            # Training never writes to these buffers: its outputs are the spare ones.
            self._anchor = _values(self._trainable, weights)
        if "momentum" in self._options:
            self._velocity = _zeros(self._trainable)

    def get_weights(self) -> Tensors:
        """Copy out all weights and buffers."""
        return {name: np.array(value.numpy()) for name, value in self._weights.items()}

    def set_velocity(self, velocity: Mapping[str, Array]) -> None:
        """Copy in the local velocity.

        Raises:
            TensorError: it is not one tensor for each trainable parameter.
        """
        check(velocity, self._trainable)
        self._velocity = _values(self._trainable, velocity)

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
        if missing := sorted(optimiser.options() - set(self._options)):
            raise BundleError(f"the bundle was exported without the option {missing[0]}: export it again")
        session = self._sessions("train")
        if not self._spare:
            self._spare = _zeros(self._specs)
            self._spare_velocity = _zeros(self._trainable if self._velocity else [])
        feed = {
            "x": x,
            "y": y,
            "sample_weight": sample_weight,
            "lr": np.array(optimiser.lr, np.float32),
            "weight_decay": np.array(optimiser.weight_decay, np.float32),
            "momentum": np.array(optimiser.momentum, np.float32),
            "proximal": np.array(optimiser.proximal, np.float32),
            "clip_norm": np.array(optimiser.clip_norm or np.finfo(np.float32).max, np.float32),
            **{f"noise{i}": drawn for i, drawn in enumerate(noise)},
        }
        binding = self._bind(session, feed)
        for name, value in self._spare.items():
            binding.bind_ortvalue_output(f"new/{name}", value)
        for name, value in self._spare_velocity.items():
            binding.bind_ortvalue_output(f"new_velocity/{name}", value)
        loss, correct = _value(np.zeros((), np.float32)), _value(np.zeros((), np.int64))
        binding.bind_ortvalue_output("loss_sum", loss)
        binding.bind_ortvalue_output("correct", correct)
        session.run_with_iobinding(binding)
        self._weights, self._spare = self._spare, self._weights
        self._velocity, self._spare_velocity = self._spare_velocity, self._velocity
        return Sums(float(loss.numpy()), int(correct.numpy()), int(np.count_nonzero(sample_weight)))

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

    def _run(self, method: str, feed: Mapping[str, Array]) -> Tensors:
        session = self._sessions(method)
        binding = self._bind(session, feed)
        names = [output.name for output in session.get_outputs()]
        for name in names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        return dict(zip(names, (np.array(v.numpy()) for v in binding.get_outputs()), strict=True))

    def _bind(self, session: Any, feed: Mapping[str, Array]) -> Any:
        binding = session.io_binding()
        held = {"weights": self._weights, "velocity": self._velocity, "anchor": self._anchor}
        for name in (node.name for node in session.get_inputs()):
            group, _, tensor = name.partition("/")
            if group in held:
                binding.bind_ortvalue_input(name, held[group][tensor])
            else:
                binding.bind_ortvalue_input(name, _value(np.ascontiguousarray(feed[name])))
        return binding

    def _open(self, method: str) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Worker threads that spin after a run would burn a phone's battery between steps.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        program = self._bundle.program("onnx", method)
        return ort.InferenceSession(program, options, providers=list(self._providers))


def _value(array: Array) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(array)


def _values(specs: Sequence[TensorSpec], tensors: Mapping[str, Array]) -> dict[str, Any]:
    # A copy of our own each: an OrtValue on the CPU shares the array's memory.
    return {spec.name: _value(tensors[spec.name].copy()) for spec in specs}


def _zeros(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {spec.name: _value(np.zeros(spec.shape, spec.dtype)) for spec in specs}


def _check_providers(providers: Sequence[str] | None) -> Sequence[str]:
    available = ort.get_available_providers()
    for provider in providers or ():
        if provider not in available:
            raise RuntimeUnavailableError(
                f"execution provider {provider} is not in this ONNX Runtime, which has {', '.join(available)}"
            )
    return providers or ("CPUExecutionProvider",)
