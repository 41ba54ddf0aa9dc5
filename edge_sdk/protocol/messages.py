"""The control messages: small JSON documents, typed and validated. docs/protocol.md specifies them.

No message holds a floating-point number as a JSON number: what must survive exactly is a string.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from edge_sdk.errors import ProtocolError

PROTOCOL = 1
MAX_MESSAGE = 16 << 10

# A bare $ also matches before a line's end.
_END = r"$(?!\n)"

Text = Annotated[str, Meta(max_length=500)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}" + _END)]
Token = Annotated[str, Meta(pattern="^[0-9a-f]{16,32}" + _END)]
Number = Annotated[str, Meta(pattern=r"^-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?" + _END)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[int, Meta(ge=0, le=10_000_000)]
Log2 = Annotated[int, Meta(ge=-62, le=62)]
Kind: TypeAlias = Literal["train", "evaluate", "describe", "statistics"]
"""What a task asks for: an update, an evaluation, a description of the data, statistics of its features."""
Fact: TypeAlias = Literal["histogram", "descriptor", "feature"]
"""What a description may hold: the label histogram, the hash of the mean feature, the mean feature itself."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Base of all messages; the JSON field ``type`` is the class's name in lower case."""


class Ref(msgspec.Struct, frozen=True, kw_only=True):
    """A blob by content: hex SHA-256, size in bytes, bytes in a chunk, and where it may be had.

    Sources are tried in order: ``retained`` (published blocks), ``ask`` (a grant to the server).
    """

    hash: Hash
    size: Annotated[int, Meta(ge=1, le=1 << 31)]
    chunk: Annotated[int, Meta(ge=1024, le=1 << 28)]
    sources: tuple[Text, ...] = ("retained", "ask")


class Augmentation(msgspec.Struct, frozen=True, kw_only=True):
    """How a device multiplies the examples of rare classes: target multiples by class, as decimal text.

    ``stored``: the copies are made once and kept in memory; else made anew at each access.
    """

    multiples: dict[Annotated[str, Meta(pattern="^[0-9]{1,7}" + _END)], Number]
    seed: Count
    stored: bool = True


class Key(Message, frozen=True, kw_only=True):
    """What makes a piece of work, and all that is said of it, idempotent (with the device's id).

    ``hop`` counts the turns of a chain of devices, over all its passes; it is 0 where there is none.
    """

    run: Token
    round: Count
    attempt: Count
    kind: Kind
    hop: Count = 0

    @property
    def key(self) -> tuple[str, int, int, str, int]:
        """Run, round, attempt, kind and hop."""
        return self.run, self.round, self.attempt, self.kind, self.hop


class KeyFields(TypedDict):
    """The fields of a :class:`Key`."""

    run: str
    round: int
    attempt: int
    kind: Kind
    hop: int


def key_of(message: Key) -> KeyFields:
    """The key's fields by name, for a message about the same piece of work."""
    return KeyFields(
        run=message.run, round=message.round, attempt=message.attempt, kind=message.kind, hop=message.hop
    )


# From a device to the server.


class Join(Message, frozen=True, kw_only=True):
    """A device is there. Sent after every connect, every ``who``, and until it is welcomed.

    ``install`` stays with the work folder, ``boot`` with the process, ``nonce`` with the connection.
    """

    protocol: int = PROTOCOL
    sdk: Text
    install: Token
    boot: Token
    nonce: Token
    examples: Count
    lease: Seconds | None = None


class Here(Message, frozen=True, kw_only=True):
    """A heartbeat of the connection ``nonce``, with the present size of the data set."""

    nonce: Token
    examples: Count


class Leave(Message, frozen=True, kw_only=True):
    """The connection ``nonce`` ends: the will, and the goodbye."""

    nonce: Token


class Taken(Key, frozen=True, kw_only=True):
    """The task has arrived and is being done, on ``examples`` of the device's own.

    None when a task that is under way comes again: the number was said the first time.
    """

    examples: Count | None


class Declined(Key, frozen=True, kw_only=True):
    """The task will not be done: not now (battery, charging, network), or it failed."""

    reason: Text


class Offer(Key, frozen=True, kw_only=True):
    """A finished update, description or statistics, to be fetched by grants; repeated until its receipt."""

    blob: Ref
    examples: Count


class Report(Key, frozen=True, kw_only=True):
    """A finished evaluation, as sums over the device's held-out examples; repeated until its receipt."""

    loss: Number
    correct: Count
    examples: Count


class Grant(Message, frozen=True, kw_only=True):
    """The receiver of a blob may be sent the chunks ``start`` to ``stop`` − 1. Both directions."""

    blob: Hash
    start: Count
    stop: Count


# From the server to a device, or to all.


class Who(Message, frozen=True, kw_only=True):
    """A server has started: who is there? Devices join again, each after a jitter.

    Servers hear it too, so that two on one fleet notice each other by ``server``, made once a process; the
    one that has served for fewer seconds, ``age``, gives way.
    """

    jitter: Seconds
    server: Token
    age: Seconds = 0


class Welcome(Message, frozen=True, kw_only=True):
    """The device of connection ``nonce`` takes part in ``run``; ``bundle`` is the run's."""

    nonce: Token
    run: Token
    bundle: Ref
    model: Ref
    heartbeat: Seconds
    come_back: Seconds | None = None


class Refused(Message, frozen=True, kw_only=True):
    """The device of connection ``nonce`` does not take part, for ``reason``."""

    nonce: Token
    code: Literal["id-in-use", "protocol"]
    reason: Text


class Task(Key, frozen=True, kw_only=True):
    """Work for one device: train from ``model``, evaluate it, or describe the device's data by it.

    Repeated until taken. ``wants`` belongs to a description, ``covariance`` and ``rank`` to statistics.
    """

    nonce: Token
    bundle: Ref
    model: Ref
    deadline: Seconds
    epochs: Annotated[int, Meta(ge=1, le=10_000)] = 1
    batch_size: Annotated[int, Meta(ge=1, le=1 << 20)] = 32
    lr: Number = "0"
    weight_decay: Number = "0"
    momentum: Number = "0"
    keep_momentum: bool = False
    proximal: Number = "0"
    clip_norm: Number = "0"
    seed: Count = 0
    bounds: dict[str, Log2] = {}
    exponents: dict[str, Log2] = {}
    codec: Literal["fp32", "fp16", "int8"] = "fp32"
    compression: Literal["none", "zstd"] = "none"
    augmentation: Augmentation | None = None
    wants: tuple[Fact, ...] = ()
    covariance: Literal["full", "diagonal", "low_rank"] = "diagonal"
    rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0


class Receipt(Key, frozen=True, kw_only=True):
    """The server's word on a result: the only proof of delivery."""

    accepted: bool
    reason: Text = ""
    blob: Hash | None = None


class Cancel(Key, frozen=True, kw_only=True):
    """The task is no longer wanted."""

    reason: Text


class Finished(Message, frozen=True, kw_only=True):
    """The run has ended; ``model`` is its last model."""

    run: Token
    model: Ref
    reason: Text = ""


FromDevice: TypeAlias = Join | Here | Leave | Taken | Declined | Offer | Report | Grant
FromServer: TypeAlias = Who | Welcome | Refused | Task | Receipt | Cancel | Finished | Grant
_M = TypeVar("_M", bound=Message)
_FROM_DEVICE: msgspec.json.Decoder[FromDevice] = msgspec.json.Decoder(FromDevice)
_FROM_SERVER: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


def kind_of(message: Message) -> str:
    """The message's ``type``, which is also the last part of its topic."""
    return type(message).__name__.lower()


def encode(message: Message) -> bytes:
    """The message as JSON.

    >>> encode(Leave(nonce="00" * 8))
    b'{"type":"leave","nonce":"0000000000000000"}'
    """
    return msgspec.json.encode(message)


def decode_from_device(kind: str, payload: bytes) -> FromDevice:
    """Decode what arrived on ``up/<id>/<kind>``.

    Raises:
        ProtocolError: over 16 KiB, not valid JSON, a field out of its range, or another type than the topic.
    """
    return _decode(_FROM_DEVICE, kind, payload)


def decode_from_server(kind: str, payload: bytes) -> FromServer:
    """Decode what arrived on ``down/<id>/<kind>`` or ``all/<kind>``; errors as for devices."""
    return _decode(_FROM_SERVER, kind, payload)


def number(text: str) -> float:
    """The finite float that a :data:`Number` stands for; ProtocolError for one out of float64's range."""
    value = float(text)
    if not math.isfinite(value):
        raise ProtocolError(f"the number {text} is out of range")
    return value


def to_number(value: float) -> str:
    """The shortest string that reads back as exactly ``value``; ValueError if it is not finite.

    >>> to_number(0.1), number(to_number(1e-05)) == 1e-05
    ('0.1', True)
    """
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return repr(float(value))


def _decode(decoder: msgspec.json.Decoder[_M], kind: str, payload: bytes) -> _M:
    if len(payload) > MAX_MESSAGE:
        raise ProtocolError(f"a {kind} message of {len(payload)} bytes is over the limit of {MAX_MESSAGE}")
    try:
        message = decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a {kind} message is not valid: {error}") from None
    if kind_of(message) != kind:
        raise ProtocolError(f"a {kind_of(message)} message came on the topic of {kind}")
    return message
