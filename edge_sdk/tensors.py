"""Named tensors as safetensors bytes, checked against a declaration before they are used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from edge_sdk.errors import TensorError

Array: TypeAlias = npt.NDArray[Any]
Tensors: TypeAlias = dict[str, Array]

_NUMPY_OF = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
}
MAX_HEADER_BYTES = 1 << 20
"""Of a file's header, which reading makes a dozen times larger: about ten thousand tensors."""


class TensorSpec(msgspec.Struct, frozen=True):
    """What one tensor must look like: its name, shape and numpy dtype name (``float32``, ``int64``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * np.dtype(self.dtype).itemsize


def encode(tensors: Mapping[str, Array]) -> bytes:
    """Serialise ``tensors``: the same tensors always give the same bytes.

    >>> encode({"b": np.zeros(2, np.float32)}) == encode({"b": np.zeros(2, np.float32)})
    True

    Raises:
        TensorError: too many tensors to be read again: their header is over 1 MiB.
    """
    ordered = {name: np.array(tensors[name], order="C", copy=None) for name in sorted(tensors)}
    data = bytes(safetensors.numpy.save(ordered))
    _check_header(data)
    return data


def decode(data: bytes, expected: Iterable[TensorSpec]) -> Tensors:
    """Read safetensors ``data`` that must hold exactly the ``expected`` tensors.

    Names, shapes and dtypes are compared with the declaration before an array is made; the arrays own
    their memory. Values are not looked at: see :func:`check_finite`.

    Raises:
        TensorError: the bytes are not safetensors, or a tensor is missing, unexpected or of another
            shape or dtype than declared.
    """
    specs = {spec.name: spec for spec in expected}
    found = views(data)
    _check_names(found.keys(), specs.keys())
    tensors = {}
    for name, spec in specs.items():
        view = found[name]
        dtype = np.dtype(spec.dtype)
        if _NUMPY_OF.get(view["dtype"]) != dtype or tuple(view["shape"]) != spec.shape:
            raise TensorError(
                f"tensor {name!r} is {view['dtype']} {list(view['shape'])}, "
                f"expected {spec.dtype} {list(spec.shape)}"
            )
        tensors[name] = np.frombuffer(view["data"], dtype).reshape(spec.shape).copy()
    return tensors


def views(data: bytes) -> dict[str, dict[str, Any]]:
    """By name the ``dtype``, ``shape`` and ``data`` of each tensor in safetensors ``data``, not yet checked.

    Raises:
        TensorError: the bytes are not safetensors, or their header is over 1 MiB.
    """
    _check_header(data)
    try:
        return dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except (safetensors.SafetensorError, ValueError, OverflowError) as error:
        raise TensorError(f"not a valid safetensors file: {error}") from None


def check(tensors: Mapping[str, Array], expected: Iterable[TensorSpec]) -> None:
    """Check tensors already in memory against a declaration.

    Raises:
        TensorError: as :func:`decode` does.
    """
    specs = {spec.name: spec for spec in expected}
    _check_names(tensors.keys(), specs.keys())
    for name, spec in specs.items():
        if tensors[name].dtype != np.dtype(spec.dtype) or tensors[name].shape != spec.shape:
            raise TensorError(
                f"tensor {name!r} is {tensors[name].dtype} {list(tensors[name].shape)}, "
                f"expected {spec.dtype} {list(spec.shape)}"
            )


def check_finite(tensors: Mapping[str, Array]) -> None:
    """Raise TensorError that names the first tensor holding a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise TensorError(f"tensor {name!r} holds NaN or infinite values")


def sha256(data: bytes | memoryview) -> str:
    """Hex SHA-256 of ``data``: how bundles, models and updates are named."""
    return hashlib.sha256(data).hexdigest()


def _check_header(data: bytes) -> None:
    if (size := int.from_bytes(data[:8], "little")) > MAX_HEADER_BYTES:
        raise TensorError(
            f"not a valid safetensors file: its header of {size} bytes is over {MAX_HEADER_BYTES}"
        )


def _check_names(found: Iterable[str], expected: Iterable[str]) -> None:
    missing, surplus = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        raise TensorError(f"tensor {missing[0]!r} is missing ({len(missing)} in all)")
    if surplus:
        raise TensorError(f"tensor {surplus[0]!r} is not part of this model ({len(surplus)} in all)")
