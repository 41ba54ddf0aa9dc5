"""Training, evaluation and prediction on ExecuTorch, for boards that have PyTorch anyway.

ExecuTorch's wheel is linked against PyTorch's, so this module, and it alone, brings that in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, RuntimeUnavailableError
from edge_sdk.runtime import Optimiser, Sums
from edge_sdk.runtime.signature import Signature, frozen_signature, signature
from edge_sdk.tensors import Array, Tensors, TensorSpec, check

try:
    import torch  # the binding is linked against it
    from executorch.extension.pybindings import _C  # type: ignore[attr-defined]
except ImportError as error:
    raise RuntimeUnavailableError(
        f"ExecuTorch cannot be imported ({error}): pip install 'edge-sdk-fl[executorch]'"
    ) from None

_DTYPES = {4: "int64", 6: "float32"}
"""Of ExecuTorch's scalar types."""

# What ExecuTorch logs goes to Python, by way of a std::cerr that the binding changes for the whole process
# and puts back afterwards. Python may run another thread meanwhile: two calls at once corrupt memory.
_calling = Lock()


class ExecutorchRuntime:
    """One bundle in ExecuTorch; see :class:`edge_sdk.runtime.Runtime`.

    Its programs take a fixed number of examples. A smaller batch is filled up with examples of weight 0,
    which leave no trace.

    Args:
        bundle: exported for ``executorch``; its weights are the first ones.
        threads: threads of this process for ExecuTorch, other open programs included; 0 leaves them as they
            are.

    Raises:
        BundleError: the bundle holds no ExecuTorch programs, or they are of another version.
    """

    def __init__(self, bundle: Bundle, *, threads: int = 0) -> None:
        self._bundle, self._manifest = bundle, (manifest := bundle.manifest)
        program = bundle.program("executorch", "train")
        self._program = OpenProgram(program, manifest.name, threads, batch_of="predict")
        for method in ("train", "evaluate", "predict", "embed"):
            self._program.check(method, signature(manifest, method, self._program.batch))
        self._trainable = manifest.trainable
        self._weights: dict[str, torch.Tensor] = {}
        self._anchor: dict[str, torch.Tensor] = {}
        self._velocity: dict[str, torch.Tensor] = {}
        self.set_weights(bundle.weights)

    def set_weights(self, weights: Mapping[str, Array]) -> None:
        """Copy in all weights and buffers; TensorError if they are not those that the manifest declares."""
        self.go_on(weights)
        if "proximal" in self._manifest.options:
            self._anchor = {spec.name: self._weights[spec.name] for spec in self._trainable}
        if "momentum" in self._manifest.options:
            self._velocity = {spec.name: torch.zeros(spec.shape) for spec in self._trainable}

    def go_on(self, weights: Mapping[str, Array]) -> None:
        """Copy in what training has come to; TensorError as for :meth:`set_weights`."""
        check(weights, self._manifest.specs)
        self._weights = {spec.name: _tensor(weights[spec.name], spec) for spec in self._manifest.specs}

    def get_weights(self) -> Tensors:
        """Copy out all weights and buffers."""
        return {name: tensor.numpy().copy() for name, tensor in self._weights.items()}

    def set_velocity(self, velocity: Mapping[str, Array]) -> None:
        """Copy in the local velocity; TensorError if it is not one tensor for each trainable parameter."""
        check(velocity, self._trainable)
        self._velocity = {spec.name: _tensor(velocity[spec.name], spec) for spec in self._trainable}

    def get_velocity(self) -> Tensors:
        """Copy out the local velocity; empty for a bundle without ``momentum``."""
        return {name: tensor.numpy().copy() for name, tensor in self._velocity.items()}

    def train_step(
        self, x: Array, y: Array, sample_weight: Array, optimiser: Optimiser, noise: Sequence[Array] = ()
    ) -> Sums:
        """One optimiser step; see :class:`edge_sdk.runtime.Runtime`.

        Raises:
            BundleError: the bundle was exported without an option that ``optimiser`` needs, or for fewer
                examples than are given.
        """
        manifest = self._manifest
        optimiser.check(manifest.options)
        most = self._program.batch
        if len(x) > most:
            raise BundleError(
                f"the bundle's ExecuTorch programs take {most} examples, a batch has {len(x)}: export it "
                f"with --batch {len(x)}, or set batch_size to {most}"
            )
        filled = self._program.filled
        arguments = [*self._weights.values(), *(filled(array) for array in (x, y, sample_weight))]
        arguments += [torch.tensor(optimiser.lr), torch.tensor(optimiser.weight_decay)]
        if "momentum" in manifest.options:
            arguments += [torch.tensor(optimiser.momentum), *self._velocity.values()]
        if "proximal" in manifest.options:
            arguments += [torch.tensor(optimiser.proximal), *self._anchor.values()]
        if "clipping" in manifest.options:
            arguments.append(torch.tensor(optimiser.longest))
        arguments += [filled(drawn) for drawn in noise]
        results = iter(self._program.run("train", arguments))
        self._weights = {name: next(results) for name in self._weights}
        self._velocity = {name: next(results) for name in self._velocity}
        loss_sum, correct = results
        return Sums(float(loss_sum), int(correct), int(np.count_nonzero(sample_weight)))

    def evaluate(self, x: Array, y: Array) -> Sums:
        """Loss and correct predictions of the current weights, in evaluation mode."""
        totals = Sums(0.0, 0, 0)
        ones = np.ones(len(x), np.float32)
        for loss_sum, correct in self._program.run_all("evaluate", self._weights.values(), x, y, ones):
            totals += Sums(float(loss_sum), int(correct), 0)
        return totals._replace(examples=len(x))

    def predict(self, x: Array) -> Array:
        """Logits float32 [B, classes] of the current weights."""
        return self._program.outputs("predict", self._weights.values(), x)

    def embed(self, x: Array) -> Array:
        """Penultimate features float32 [B, feature_size] of the current weights."""
        return self._program.outputs("embed", self._weights.values(), x)

    def backbone(self, images: Array) -> Array:
        """Features of prepared images; see :class:`edge_sdk.runtime.Runtime`."""
        return self._backbone(images)

    @cached_property
    def _backbone(self) -> Callable[[Array], Array]:
        program, manifest = self._bundle.backbone("executorch"), self._manifest
        return open_frozen(program, "backbone", manifest.input.shape, manifest.entering)


def open_frozen(
    program: bytes, method: str, takes: tuple[int, ...], gives: tuple[int, ...], *, threads: int = 0
) -> Callable[[Array], Array]:
    """A program that holds its own weights (``describe``, ``backbone``): from ``x`` to its one output.

    Args:
        program: the ``.pte``.
        method: its only one.
        takes: shape of one image.
        gives: shape of its features.
        threads: of this process for ExecuTorch; 0 leaves them as they are.

    Raises:
        BundleError: the program is of another version, or none, or has other inputs or outputs.
    """
    opened = OpenProgram(program, method, threads, batch_of=method)
    opened.check(method, frozen_signature(takes, gives, opened.batch))
    return partial(opened.outputs, method, ())


class OpenProgram:
    """One ``.pte``, open as long as this object lives; for any number of threads.

    Args:
        data: the file.
        name: by which errors call it.
        threads: of this process for ExecuTorch, other open programs included; 0 leaves them as they are.
        batch_of: a method whose first result has the batch as its first axis; what other methods take has it
            too. Without one only :meth:`run` is of use.

    Raises:
        BundleError: the program is of another version, or none.
    """

    def __init__(self, data: bytes, name: str, threads: int, *, batch_of: str | None = None) -> None:
        # The module reads from these bytes and does not keep them alive.
        self._data, self._name = data, name
        self._module: Any
        with _calling:
            _set_threads(threads)
            try:
                self._open()
                # It looks at the bytes only now.
                self._module.method_names()
                self.batch = self._batch_of(batch_of) if batch_of else 0
            except (RuntimeError, IndexError) as error:
                reason = str(error).partition("\n")[0]
                raise BundleError(
                    f"the programs of {name!r} cannot be opened by this ExecuTorch ({reason}): export the "
                    "bundle with the version that devices have"
                ) from None
            _programs.add(self)

    def check(self, method: str, expected: Signature) -> None:
        """Hold the shapes and dtypes that a method takes and gives against those expected.

        Raises:
            BundleError: they are others, or there is no such method.
        """
        try:
            with _calling:
                meta = self._module.method_meta(method)
                inputs = [_shape(meta.input_tensor_meta(i)) for i in range(meta.num_inputs())]
                outputs = [_shape(meta.output_tensor_meta(i)) for i in range(meta.num_outputs())]
        except (RuntimeError, IndexError):
            inputs = outputs = []
        if self.batch < 1 or [inputs, outputs] != [
            [(spec.shape, spec.dtype) for spec in specs] for specs in (expected.inputs, expected.outputs)
        ]:
            raise BundleError(
                f"the {method} program of {self._name!r} for ExecuTorch takes or gives other tensors than "
                "the bundle's manifest says: export it again"
            )

    def run(self, method: str, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of one call, in memory of their own."""
        with _calling:
            results: list[torch.Tensor] = self._module.run_method(method, arguments)
        return results

    def run_all(
        self, method: str, first: Collection[torch.Tensor], *examples: Array
    ) -> Iterator[list[torch.Tensor]]:
        """The results for any number of examples, batch by batch; ``first`` are the arguments before them."""
        for start in range(0, max(len(examples[0]), 1), self.batch):
            batch = (self.filled(array[start : start + self.batch]) for array in examples)
            yield self.run(method, [*first, *batch])

    def outputs(self, method: str, first: Collection[torch.Tensor], x: Array) -> Array:
        """What a method with one result gives for any number of examples."""
        parts = [result.numpy() for (result,) in self.run_all(method, first, x)]
        return np.concatenate(parts)[: len(x)]

    def filled(self, array: Array) -> torch.Tensor:
        """The examples, and zeros up to a whole batch."""
        if len(array) == self.batch:
            return torch.from_numpy(np.ascontiguousarray(array))
        filled = np.zeros((self.batch, *array.shape[1:]), array.dtype)
        filled[: len(array)] = array
        return torch.from_numpy(filled)

    def _open(self) -> None:
        self._module = _C._load_for_executorch_from_buffer(self._data)

    def _batch_of(self, method: str) -> int:
        return int(self._module.method_meta(method).output_tensor_meta(0).sizes()[0])


_programs: WeakSet[OpenProgram] = WeakSet()


def _set_threads(count: int) -> None:
    # A method keeps the pool of threads that it was opened with, which goes when another is made.
    if count in (0, _C._threadpool_get_thread_count()):
        return
    programs = list(_programs)
    for program in programs:
        program._module = None
    _C._unsafe_reset_threadpool(count)
    for program in programs:
        program._open()


def _shape(meta: Any) -> tuple[tuple[int, ...], str]:
    return tuple(meta.sizes()), _DTYPES.get(meta.dtype(), f"number {meta.dtype()}")


def _tensor(array: Array, spec: TensorSpec) -> torch.Tensor:
    return torch.from_numpy(np.array(array, order="C").reshape(spec.shape))
