"""Updates: the difference, and what the server reads of a file in every codec, or why it refuses it."""

from __future__ import annotations

import math
import struct
from typing import Any

from vectors.plain import Tensor, document, float32, safetensors, shown, tensor

MODEL = {
    "conv.weight": ("F32", [2, 3], "mean"),
    "conv.bias": ("F32", [2], "mean"),
    "norm.running_mean": ("F32", [2], "statistic"),
    "norm.num_batches_tracked": ("I64", [], "counter"),
}
BOUNDS = {"mean": 6, "statistic": 16, "counter": 40}
LIMIT = 4096
TINY = 2.0**-149


def made(weight: list[float], bias: list[float], mean: list[float], batches: int) -> dict[str, Tensor]:
    values = {"conv.weight": weight, "conv.bias": bias, "norm.running_mean": mean}
    values["norm.num_batches_tracked"] = [batches]
    return {name: tensor(dtype, shape, values[name]) for name, (dtype, shape, _) in MODEL.items()}


UPDATE = made([0.1, -0.25, 64.0, -64.0, TINY, -0.0], [1 / 3, -1e-30], [65536.0, -1.5], -(1 << 40))
KEPT = {name: UPDATE[name] for name in ("norm.running_mean", "norm.num_batches_tracked")}
HALVES = {
    "conv.weight": tensor("F16", [2, 3], [0.1, -0.25, 64.0, -64.0, 2.0**-24, -0.0]),
    "conv.bias": tensor("F16", [2], [1 / 3, 0.0]),
}
INTEGERS = {
    "conv.weight": tensor("I8", [2, 3], [127, -127, 1, 0, 64, -3]),
    "scale/conv.weight": tensor("F32", [2], [64 / 127, 0.1]),
    "conv.bias": tensor("I8", [2], [-127, 100]),
    "scale/conv.bias": tensor("F32", [1], [1 / 3 / 127]),
}
ZEROS = {
    "conv.weight": tensor("I8", [2, 3], [0, 0, 0, 127, -127, 5]),
    "scale/conv.weight": tensor("F32", [2], [0.0, TINY]),
    "conv.bias": tensor("I8", [2], [127, -1]),
    "scale/conv.bias": tensor("F32", [1], [64 / 127]),
}


def scaled(name: str, scale: float) -> dict[str, Tensor]:
    """The int8 update with one scale, of a tensor's, that is another."""
    return {**INTEGERS, **KEPT, f"scale/{name}": ("F32", [1], [scale])}


def read(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the server reads: float32 of each value, or the integer times its scale, rounded once."""
    tensors = {}
    for name, (dtype, shape, _) in MODEL.items():
        values = sent[name][2]
        if sent[name][0] == "I8":
            scales = sent[f"scale/{name}"][2]
            # Exact in float64: 7 bits times 24.
            each = len(values) // len(scales)
            values = [float32(value * scales[place // each]) for place, value in enumerate(values)]
        tensors[name] = (dtype, shape, values)
    return tensors


def frame(data: bytes, *, size: int | None = None, said: bool = True) -> bytes:
    """A zstd frame (RFC 8878) of ``data`` in a raw and a run-length block, with the size of its content."""
    runs = len(data) - len(data.rstrip(b"\0"))
    head, content = data[: len(data) - runs], b""
    for last, kind, length, block in ((not runs, 0, len(head), head), (True, 1, runs, b"\0")):
        if length:
            content += struct.pack("<I", last | kind << 1 | length << 3)[:3] + block
    length_field = struct.pack("<I", len(data) if size is None else size)
    # Single segment, 4 bytes of content size; or a window descriptor of 1 KiB in its place.
    return b"\x28\xb5\x2f\xfd" + (b"\xa0" + length_field if said else b"\x00\x00") + content


# What the zstd library 1.5.7 makes of the file of HALF_EVERYWHERE at level 19; others make other bytes.
HALF_EVERYWHERE = made([0.5] * 6, [0.5] * 2, [0.5] * 2, -7)
COMPRESSED = bytes.fromhex(
    "28b52ffd605000fd0400d2481f1fb0eb77499224496a57254db6ddcce3a66893da0b86d82c9062eb1714246f1939e79c"
    "73fe1008a120781e634c27e62c94a752ce6398de2a39f81b5a6596981ea5fd5ad1c84ed666d85061968dd267bc3f35ee"
    "31333ab11c7d71bd1064d1c7ffb433d2e3f2d26def28933eba5e1c7eba3b1a4bd154b741b396d31d04820c0077a4be1e"
    "8031468107285e953020c4fa41787688402a023ac5b4d78221"
)


def differences() -> list[dict[str, Any]]:
    received = made([1.0, 0.1, 16777216.0, 1e-8, 3.0, 0.0], [0.3, 2.0], [0.5, 10.0], 41)
    trained = made([0.75, 0.2, 16777215.0, 1.0, 3.0, -0.0], [0.1, 2.5], [0.25, 12.5], 48)
    delta = {}
    for name, (dtype, shape, _) in MODEL.items():
        values = [a - b for a, b in zip(received[name][2], trained[name][2], strict=True)]
        delta[name] = tensor(dtype, shape, values)
    return [{"received": shown(received), "trained": shown(trained), "update": shown(delta)}]


def vector(fact: str, codec: str, sent: dict[str, Tensor], compression: str = "none") -> dict[str, Any]:
    data = safetensors(sent)
    return {
        "fact": fact,
        "codec": codec,
        "compression": compression,
        "hex": (data if compression == "none" else frame(data)).hex(),
        "read": shown(read(sent)),
    }


def refused() -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = []

    def add(why: str, fact: str, data: bytes, codec: str = "fp32", compression: str = "none") -> None:
        vectors.append(
            {"why": why, "fact": fact, "codec": codec, "compression": compression, "hex": data.hex()}
        )

    whole = safetensors(UPDATE)
    for fact, data in {
        "nothing": b"",
        "cut": whole[:-1],
        "longer than its header says": whole + b"\0",
        "a header longer than the file": struct.pack("<Q", 1 << 40) + whole[8:],
        "a header that is not JSON": whole.replace(b'{"conv', b"{'conv", 1),
        "offsets beyond the data": whole.replace(b"[40,48]", b"[40,99]"),
        "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01w\x94K\x01s.",
    }.items():
        add("damaged", fact, data)
    less = {name: UPDATE[name] for name in MODEL if name != "conv.bias"}
    for fact, tensors, codec in (
        ("one is missing", less, "fp32"),
        ("one too many", {**UPDATE, "more": tensor("F32", [1], [0.0])}, "fp32"),
        ("another shape", {**UPDATE, "conv.weight": tensor("F32", [3, 2], [0.0] * 6)}, "fp32"),
        ("another dtype", {**UPDATE, "conv.bias": tensor("F64", [2], [0.0, 0.0])}, "fp32"),
        ("float32 where halves were asked for", UPDATE, "fp16"),
        ("halves where float32 was asked for", {**HALVES, **KEPT}, "fp32"),
        ("no scale", {n: t for n, t in {**INTEGERS, **KEPT}.items() if n != "scale/conv.bias"}, "int8"),
        ("one scale for two channels", scaled("conv.weight", 1.0), "int8"),
    ):
        add("tensors", fact, safetensors(tensors), codec)
    for bad in (-TINY, math.inf, -math.inf, math.nan):
        add("scale", f"a scale of {bad}", safetensors(scaled("conv.bias", bad)), "int8")
    for bad in (math.nan, math.inf, -math.inf):
        add("finite", f"{bad}", safetensors({**UPDATE, "conv.bias": ("F32", [2], [0.0, bad])}))
    infinite: Tensor = ("F16", [2], [math.inf, 0.0])
    add("finite", "a half of inf", safetensors({**HALVES, **KEPT, "conv.bias": infinite}), "fp16")
    above = float32(64 + 2.0**-17)
    for name, values in {
        "conv.weight": [above, 0.0, 0.0, 0.0, 0.0, 0.0],
        "norm.running_mean": [0.0, -65536.0078125],
        "norm.num_batches_tracked": [-(1 << 40) - 1],
    }.items():
        dtype, shape, _ = MODEL[name]
        add("bound", f"{name} beyond it", safetensors({**UPDATE, name: (dtype, shape, values)}))
    add("bound", "a product beyond it", safetensors(scaled("conv.bias", above / 127)), "int8")
    for fact, data in {
        "a frame that does not say its size": frame(whole, said=False),
        "a frame that says more than the limit": frame(whole, size=LIMIT + 1),
        "a frame of run lengths that says more than the limit": frame(whole + bytes(LIMIT)),
    }.items():
        add("size", fact, data, compression="zstd")
    for fact, data in {
        "a frame that says less than it holds": frame(whole, size=len(whole) - 1),
        "a frame that says more than it holds": frame(whole, size=len(whole) + 1),
        "a cut frame": frame(whole)[:-1],
        "no frame": whole,
    }.items():
        add("damaged", fact, data, compression="zstd")
    return vectors


def updates() -> str:
    parameters = [
        {"name": name, "dtype": dtype, "shape": shape, "rule": rule}
        for name, (dtype, shape, rule) in MODEL.items()
    ]
    return document(
        {
            "parameters": parameters,
            "limits": [{"bounds": BOUNDS, "bytes": LIMIT}],
            "differences": differences(),
            "read": [
                vector("at the bounds", "fp32", UPDATE),
                vector("in any order", "fp32", dict(reversed(UPDATE.items()))),
                vector("half precision", "fp16", {**HALVES, **KEPT}),
                vector("a scale a channel", "int8", {**INTEGERS, **KEPT}),
                vector(
                    "a channel of zeros, the smallest scale, the largest product", "int8", {**ZEROS, **KEPT}
                ),
                vector("a frame of blocks that are not compressed", "fp32", UPDATE, "zstd"),
                vector("integers in a frame", "int8", {**INTEGERS, **KEPT}, "zstd"),
                {
                    **vector("a compressed frame", "fp32", HALF_EVERYWHERE, "zstd"),
                    "hex": COMPRESSED.hex(),
                },
            ],
            "refused": refused(),
        }
    )
