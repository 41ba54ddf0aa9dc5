"""What the programs of a bundle take and give, by its manifest; docs/bundle.md has the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_sdk.errors import BundleError
from edge_sdk.manifest import Manifest
from edge_sdk.tensors import TensorSpec

BATCH = -1
"""Stands in a shape for any number of examples."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of one program, in ExecuTorch's order."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]

    def check(self, method: str, found: Signature) -> None:
        """Hold what a program says of itself against this; it may leave out inputs that it does not read.

        Raises:
            BundleError: it takes or gives anything else, or lacks an output.
        """
        for does, these, declared in (
            ("takes", found.inputs, {*self.inputs}),
            ("gives", found.outputs, {*self.outputs}),
        ):
            for tensor in these:
                if tensor not in declared:
                    raise BundleError(
                        f"the bundle's {method} program {does} {tensor.name!r} as {tensor.dtype} "
                        f"{_shape(tensor)}, which its manifest does not: export it again"
                    )
        given = {*found.outputs}
        for tensor in self.outputs:
            if tensor not in given:
                raise BundleError(
                    f"the bundle's {method} program does not give {tensor.name!r}: export it again"
                )


def signature(manifest: Manifest, method: str, batch: int = BATCH) -> Signature:
    """Of the program ``train``, ``evaluate``, ``predict`` or ``embed``, for ``batch`` examples."""

    def scalars(*names: str) -> list[TensorSpec]:
        return [TensorSpec(name, ()) for name in names]

    def group(prefix: str, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        return [TensorSpec(f"{prefix}/{spec.name}", spec.shape, spec.dtype) for spec in specs]

    weights, x = group("weights", manifest.specs), TensorSpec("x", (batch, *manifest.entering))
    labelled = [x, TensorSpec("y", (batch,), "int64"), TensorSpec("sample_weight", (batch,))]
    sums = [*scalars("loss_sum"), TensorSpec("correct", (), "int64")]
    if method == "predict":
        return Signature([*weights, x], [TensorSpec("logits", (batch, manifest.classes))])
    if method == "embed":
        return Signature([*weights, x], [TensorSpec("features", (batch, manifest.feature_size))])
    if method == "evaluate":
        return Signature([*weights, *labelled], sums)
    inputs, outputs = [*weights, *labelled, *scalars("lr", "weight_decay")], group("new", manifest.specs)
    if "momentum" in manifest.options:
        inputs += [*scalars("momentum"), *group("velocity", manifest.trainable)]
        outputs += group("new_velocity", manifest.trainable)
    if "proximal" in manifest.options:
        inputs += [*scalars("proximal"), *group("anchor", manifest.trainable)]
    if "clipping" in manifest.options:
        inputs += scalars("clip_norm")
    inputs += [TensorSpec(noise.name, (batch, *noise.shape)) for noise in manifest.noise]
    return Signature(inputs, [*outputs, *sums])


def frozen_signature(takes: tuple[int, ...], gives: tuple[int, ...], batch: int = BATCH) -> Signature:
    """Of a program that holds its own weights, from examples of shape ``takes`` to features of ``gives``."""
    return Signature([TensorSpec("x", (batch, *takes))], [TensorSpec("features", (batch, *gives))])


def _shape(tensor: TensorSpec) -> str:
    return "[" + ", ".join("batch" if extent == BATCH else str(extent) for extent in tensor.shape) + "]"
