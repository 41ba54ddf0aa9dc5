"""How an update travels: as it is, in half precision, or with one byte a weight; optionally compressed.

Only trainable tensors are made smaller. Running statistics and counters travel as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from edge_sdk.errors import RuntimeUnavailableError, TensorError
from edge_sdk.manifest import Parameter
from edge_sdk.tensors import Array, Tensors, TensorSpec, check_finite, decode, encode

Codec: TypeAlias = Literal["fp32", "fp16", "int8"]
Compression: TypeAlias = Literal["none", "zstd"]

LEVELS = 127
"""Steps of int8 on either side of 0; -128 is not used, so that a channel's largest weight is exact."""
SCALE = "scale/"
"""What the name of a tensor's scales begins with; no parameter's name holds a '/'."""


def quantise(
    update: Mapping[str, Array],
    parameters: tuple[Parameter, ...],
    codec: Codec,
    *,
    seed: int,
    residual: Mapping[str, Array] | None = None,
) -> tuple[Tensors, Tensors]:
    """Make the trainable tensors of an update smaller, and keep what that loses for the next one.

    ``int8`` has one scale a channel (the first axis of two or more, else one a tensor), the largest
    magnitude over 127, and rounds up or down at random, so that the mean of many roundings is exact.

    Args:
        update: float32 by name.
        parameters: of the bundle's manifest.
        codec: ``fp32`` changes nothing.
        seed: of the roundings.
        residual: what the last update lost (error feedback; Seide et al., Interspeech 2014).

    Returns:
        The tensors to send, and the new residual: float32, one for each trainable tensor, empty for
        ``fp32``. It is to be kept only if the update is accepted.

    Raises:
        TensorError: a value is not finite, or beyond float16 for ``fp16``.
    """
    if codec == "fp32":
        return dict(update), {}
    check_finite(update)
    rng = np.random.default_rng([seed, 3])
    sent, lost = dict(update), {}
    for parameter in parameters:
        if parameter.rule != "mean":
            continue
        name = parameter.name
        exact = update[name] + residual[name] if residual else update[name]
        if codec == "fp16":
            sent[name] = _halved(name, exact)
        else:
            sent[name], sent[SCALE + name] = _rounded(exact, rng)
        lost[name] = exact - _restored(name, sent)
    return sent, lost


def sent_specs(parameters: tuple[Parameter, ...], codec: Codec) -> list[TensorSpec]:
    """The tensors that :func:`quantise` makes."""
    specs = []
    for parameter in parameters:
        small = parameter.rule == "mean" and codec != "fp32"
        dtype = {"fp16": "float16", "int8": "int8"}[codec] if small else parameter.dtype
        specs.append(TensorSpec(parameter.name, parameter.shape, dtype))
        if small and codec == "int8":
            specs.append(TensorSpec(SCALE + parameter.name, _channels(parameter.shape), "float32"))
    return specs


def restored(sent: Mapping[str, Array], parameters: tuple[Parameter, ...]) -> Tensors:
    """The update, in the model's own dtypes, that the server reads in what :func:`quantise` made."""
    return {parameter.name: _restored(parameter.name, sent) for parameter in parameters}


def check_available(compression: Compression) -> None:
    """Raise RuntimeUnavailableError if the compression is not installed."""
    if compression != "none":
        _zstd()


def pack(tensors: Mapping[str, Array], compression: Compression) -> bytes:
    """The bytes of an update to send; RuntimeUnavailableError if the compression is not installed."""
    data = encode(tensors)
    return data if compression == "none" else bytes(_zstd().ZstdCompressor().compress(data))


def unpack(
    data: bytes, parameters: tuple[Parameter, ...], codec: Codec, compression: Compression, *, limit: int
) -> Tensors:
    """The update, in the model's own dtypes, that was sent.

    Args:
        limit: largest size in bytes before compression.

    Raises:
        TensorError: not the tensors that the codec makes of this model's, a scale that is not finite or
            below 0, an integer below -127, or a frame that is damaged, too large, or not the only one.
    """
    if compression == "zstd":
        data = _decompressed(data, limit)
    sent = decode(data, sent_specs(parameters, codec))
    for name, tensor in sent.items():
        if name.startswith(SCALE) and not (np.isfinite(tensor) & (tensor >= 0)).all():
            raise TensorError(f"tensor {name!r} holds scales that are not finite or below 0")
        if tensor.dtype == np.int8 and (tensor < -LEVELS).any():
            raise TensorError(f"tensor {name!r} holds -128, which the codec does not make")
    return restored(sent, parameters)


def _halved(name: str, exact: Array) -> Array:
    with np.errstate(over="ignore"):
        half = exact.astype(np.float16)
    check_finite({name: half})
    return half


def _rounded(exact: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """int8 of ``exact``'s shape, and its scales, float32 [channels]."""
    channels = _by_channel(exact)
    scales = (np.abs(channels).max(axis=1, initial=0.0) / LEVELS).astype(np.float32)
    steps = channels / np.where(scales > 0, scales, 1.0).astype(np.float32)[:, None]
    rounded = np.floor(steps + rng.random(steps.shape, np.float32))
    return np.clip(rounded, -LEVELS, LEVELS).astype(np.int8).reshape(exact.shape), scales


def _restored(name: str, sent: Mapping[str, Array]) -> Array:
    tensor = sent[name]
    if tensor.dtype == np.int8:
        channels = _by_channel(tensor).astype(np.float32)
        return (channels * sent[SCALE + name][:, None]).reshape(tensor.shape)
    return tensor.astype(np.float32) if tensor.dtype == np.float16 else tensor


def _by_channel(tensor: Array) -> Array:
    (channels,) = _channels(tensor.shape)
    return tensor.reshape(channels, tensor.size // max(channels, 1))


def _channels(shape: tuple[int, ...]) -> tuple[int]:
    return (shape[0] if len(shape) > 1 else 1,)


def _decompressed(data: bytes, limit: int) -> bytes:
    zstd = _zstd()
    try:
        # The frame's own word on its size is checked before anything is allocated.
        size = zstd.frame_content_size(data)
        if not 0 <= size <= limit:
            raise TensorError(f"a compressed update declares {size} bytes, over the limit of {limit}")
        frame = zstd.ZstdDecompressor()
        return bytes(frame.decompress(data, max_output_size=limit, allow_extra_data=False))
    except zstd.ZstdError as error:
        raise TensorError(f"an update's zstd frame is damaged, or more is behind it: {error}") from None


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise RuntimeUnavailableError("zstandard is not installed: pip install 'edge-sdk-fl[zstd]'") from None
    return zstandard
