"""What comes over the wire: messages, topics, chunks, bundles, tensors."""

from __future__ import annotations

import json
import math
import re

import numpy as np

from edge_sdk.bundle import Bundle
from edge_sdk.errors import BundleError, ProtocolError, TensorError
from edge_sdk.features import Hashing
from edge_sdk.manifest import (
    MAX_ELEMENTS,
    Backbone,
    Describe,
    Input,
    Manifest,
    Parameter,
    Programs,
    parse_manifest,
)
from edge_sdk.protocol import Incoming, Topics, chunk_count, decode_chunk
from edge_sdk.protocol.messages import (
    Finished,
    FromServer,
    Offer,
    Ref,
    Report,
    Task,
    Welcome,
    decode_from_device,
    decode_from_server,
    encode,
    kind_of,
    number,
)
from edge_sdk.tensors import check_finite, decode
from edge_sdk.tensors import encode as encode_tensors
from edge_sdk.work import settings_of
from hostile.decoder import Decoder, vectors
from hostile.mutations import mutated_bundle, mutated_chunk, mutated_json, mutated_safetensors

_TYPE = re.compile(rb'"type"\s*:\s*"(\w+)"')


def _kind(data: bytes) -> str:
    found = _TYPE.search(data)
    return found[1].decode("ascii", "replace") if found else "join"


def _from_device(data: bytes) -> None:
    message = decode_from_device(_kind(data), data)
    assert decode_from_device(kind_of(message), encode(message)) == message
    if isinstance(message, Report):
        number(message.loss)
    if isinstance(message, Offer):
        Incoming(message.blob, limit=1 << 24).next_range(16)


def _from_server(data: bytes) -> None:
    message: FromServer = decode_from_server(_kind(data), data)
    assert decode_from_server(kind_of(message), encode(message)) == message
    if isinstance(message, Task):
        settings_of(message)
        for label, text in message.augmentation.multiples.items() if message.augmentation else ():
            number(text), int(label)
    if isinstance(message, Task | Welcome | Finished):
        Incoming(message.model, limit=1 << 24).next_range(16)


def _announced(data: bytes) -> None:
    """A ref of a bundle, as a device takes it: to 2 GiB."""
    message = decode_from_server("welcome", data)
    if isinstance(message, Welcome):
        incoming = Incoming(message.bundle, limit=1 << 31)
        assert incoming.count == chunk_count(message.bundle)
        incoming.next_range(16)


def _messages(*directions: str) -> list[bytes]:
    document = vectors("messages.json")
    whole = [v["means"].encode() for v in document["accepted"] if v["direction"] in directions]
    parts = [
        v["template"].replace("@", text).encode()
        for v in document["fields"]
        if v["direction"] in directions
        for text in v["accepted"]
    ]
    return whole + parts


def _topic(data: bytes) -> None:
    topics = Topics("lab-3")
    address = topics.parse(data.decode("utf-8", "surrogateescape"))
    if address is not None and address.direction in ("up", "down"):
        made = topics.up if address.direction == "up" else topics.down
        assert made(address.device, address.kind).encode("utf-8", "surrogateescape") == data
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", address.device)


def _topics() -> list[bytes]:
    document = vectors("topics.json")
    return [v["topic"].encode() for name in ("built", "ours", "others") for v in document[name]]


_TRANSFERS = vectors("transfers.json")
REF = Ref(**json.loads(_TRANSFERS["blob"][0]["ref"]))


def _chunk(data: bytes) -> None:
    incoming = Incoming(REF, limit=REF.size)
    chunk = decode_chunk(data)
    assert len(chunk.data) == len(data) - 56
    incoming.add(chunk)
    incoming.next_range(16)


def honest_bundle() -> Bundle:
    """A bundle whose programs are no programs, with a backbone, a hash and a counter."""
    programs = Programs(train="onnx/t", evaluate="onnx/e", predict="onnx/p", embed="onnx/m")
    manifest = Manifest(
        name="tiny",
        input=Input((1, 2, 2), (0.0,), (1.0,)),
        classes=3,
        parameters=(
            Parameter("head.weight", (3, 4), "float32", "mean"),
            Parameter("head.bias", (3,), "float32", "mean"),
            Parameter("norm.mean", (2,), "float32", "statistic"),
            Parameter("steps", (), "int64", "counter"),
        ),
        head=("head.weight", "head.bias"),
        feature_size=4,
        runtimes={"onnx": programs},
        backbone=Backbone((4, 2), {"onnx": "onnx/b"}),
        describe=Describe(4, 2, "describe/lsh.safetensors", {"onnx": "describe/d"}),
    )
    draw = np.random.default_rng(0)
    weights = {spec.name: np.ones(spec.shape, spec.dtype) for spec in manifest.specs}
    hashing = {"a": draw.standard_normal((2, 4)), "b": draw.random(2), "r": np.array(3.0)}
    members = {f"onnx/{letter}": letter.encode() * 5 for letter in "tepmb"}
    members |= {"describe/lsh.safetensors": encode_tensors(hashing), "describe/d": b"d"}
    return Bundle.build(manifest, weights, members)


BUNDLE = honest_bundle()
MANIFEST = BUNDLE.manifest


def _bundle(data: bytes) -> None:
    bundle = Bundle.read(data)
    assert bundle.weights.keys() == bundle.manifest.rules.keys()
    for name in bundle.manifest.members:
        bundle.member(name)
    for runtime in bundle.manifest.runtimes:
        bundle.program(runtime, "train")
        if bundle.manifest.backbone is not None:
            bundle.backbone(runtime)
    if bundle.manifest.describe is not None:
        Hashing.of(bundle)
    bundle.with_weights(bundle.weights)


def _manifest(data: bytes) -> None:
    manifest = parse_manifest(data)
    assert manifest.nbytes >= 0
    assert manifest.input.image_shape[0] >= 1
    assert 1 <= math.prod(manifest.entering) <= MAX_ELEMENTS
    assert len(manifest.rules) == len(manifest.specs)


def _tensors(data: bytes) -> None:
    tensors = decode(data, MANIFEST.specs)
    assert [tensor.shape for tensor in tensors.values()] == [spec.shape for spec in MANIFEST.specs]
    check_finite(tensors)


def decoders() -> list[Decoder]:
    """Those of what comes over the wire, but for results."""
    json_, broken = (mutated_json,), (ProtocolError,)
    welcome = next(message for message in _messages("down") if _kind(message) == "welcome")
    small = welcome.replace(b"122880", b"1024")
    largest = welcome.replace(b"2000000", b"2147483648").replace(b"122880", b"268435456")
    payloads = [bytes.fromhex(vector["hex"]) for vector in _TRANSFERS["payloads"]]
    weights = [BUNDLE.member("weights.safetensors")]
    return [
        Decoder("from_device", _from_device, _messages("up"), broken, json_),
        Decoder("from_server", _from_server, _messages("down", "all"), broken, json_),
        Decoder("announced", _announced, [welcome, small, largest], broken, json_),
        Decoder("topic", _topic, _topics(), ()),
        Decoder("chunk", _chunk, payloads, broken, (mutated_chunk,)),
        Decoder("bundle", _bundle, [BUNDLE.data], (BundleError,), (mutated_bundle,)),
        Decoder("manifest", _manifest, [BUNDLE.member("manifest.json")], (BundleError,), json_),
        Decoder("tensors", _tensors, weights, (TensorError,), (mutated_safetensors,)),
    ]
