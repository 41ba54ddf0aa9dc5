"""Blobs in numbered, hashed chunks that fit the smallest broker limit in use.

The receiver grants ranges of chunks, so that what is outstanding stays far below any queue. Chunks may
come twice, out of order, or from another transfer: a chunk is taken only if it belongs to the blob and
its own hash is right, and the whole is verified before it is used.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from edge_sdk.errors import ProtocolError
from edge_sdk.protocol.messages import Ref
from edge_sdk.tensors import sha256

CHUNK_BYTES = 120 << 10
"""Payload bytes in a chunk by default: with header and topic it fits AWS IoT Core's 128 KB a message."""
MAX_CHUNKS = 1 << 20
"""Chunks in one blob that a receiver keeps count of, a byte for each."""

_HEADER = struct.Struct(">4s32sI16s")
_MAGIC = b"EDC1"
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: the blob that it belongs to (hex SHA-256), its number, its bytes."""

    blob: str
    index: int
    data: bytes


def reference(data: bytes, *, chunk: int = CHUNK_BYTES) -> Ref:
    """The reference by which ``data`` is announced."""
    return Ref(hash=sha256(data), size=len(data), chunk=chunk)


def chunk_count(ref: Ref) -> int:
    """How many chunks the blob has; the last may be shorter."""
    return -(-ref.size // ref.chunk)


def encode_chunk(ref: Ref, data: bytes, index: int) -> bytes:
    """Chunk ``index`` of ``data`` with its header: magic, blob's SHA-256, index, the chunk's own hash."""
    part = data[index * ref.chunk : (index + 1) * ref.chunk]
    return _HEADER.pack(_MAGIC, bytes.fromhex(ref.hash), index, _digest(part)) + part


def decode_chunk(payload: bytes) -> Chunk:
    """Take a chunk message apart and check the chunk's own hash.

    Raises:
        ProtocolError: too short, another magic, or a hash that does not fit.
    """
    if len(payload) <= HEADER_BYTES:
        raise ProtocolError(f"a chunk of {len(payload)} bytes is shorter than its header")
    magic, blob, index, digest = _HEADER.unpack_from(payload)
    data = payload[HEADER_BYTES:]
    if magic != _MAGIC or digest != _digest(data):
        raise ProtocolError("a chunk is damaged: its hash does not fit")
    return Chunk(blob.hex(), index, data)


class Storage(Protocol):
    """Where the chunks of one blob lie while it comes in."""

    def held(self) -> Iterable[int]:
        """The chunks that are there from before."""

    def put(self, index: int, part: bytes) -> None:
        """Keep a chunk, whose length is right."""

    def whole(self) -> bytes:
        """All that was kept; it is verified by who asked."""

    def clear(self) -> None:
        """Forget all chunks."""


class _Memory:
    """Keeps nothing before the first chunk comes, and then has room for all."""

    def __init__(self, ref: Ref) -> None:
        self._ref = ref
        self._buffer = bytearray()

    def held(self) -> Iterable[int]:
        return ()

    def put(self, index: int, part: bytes) -> None:
        if not self._buffer:
            self._buffer = bytearray(self._ref.size)
        offset = index * self._ref.chunk
        self._buffer[offset : offset + len(part)] = part

    def whole(self) -> bytes:
        return bytes(self._buffer)

    def clear(self) -> None:
        self._buffer = bytearray()


class Incoming:
    """A blob on its way in: which chunks are there, and which to grant next.

    Args:
        ref: what the sender announced.
        limit: largest size in bytes that is accepted; checked before anything is allocated.
        storage: where its chunks are kept, with those that are there already; memory by default.

    Raises:
        ProtocolError: the announced size, or the number of its chunks, is over the limit.
    """

    def __init__(self, ref: Ref, *, limit: int, storage: Storage | None = None) -> None:
        if ref.size > limit:
            raise ProtocolError(f"a blob of {ref.size} bytes is over the limit of {limit}")
        self.ref = ref
        self.count = chunk_count(ref)
        if self.count > MAX_CHUNKS:
            raise ProtocolError(
                f"a blob in {self.count} chunks is over the limit of {MAX_CHUNKS}: use larger chunks"
            )
        self._storage = storage if storage is not None else _Memory(ref)
        self._there = bytearray(self.count)
        for index in self._storage.held():
            self._there[index] = 1
        self._left = self._there.count(0)

    @property
    def received(self) -> int:
        """Bytes received so far, each counted once."""
        full = (self.count - self._left) * self.ref.chunk
        short = self.count * self.ref.chunk - self.ref.size
        return full - short if self._there[-1] else full

    def missing_in(self, start: int, stop: int) -> bool:
        """Whether a chunk of ``start`` to ``stop`` − 1 is still missing."""
        return self._there.find(0, start, stop) >= 0

    def began(self, start: int, stop: int) -> bool:
        """Whether a chunk of ``start`` to ``stop`` − 1 is there."""
        return self._there.find(1, start, stop) >= 0

    def next_range(self, window: int) -> tuple[int, int] | None:
        """The first missing range of at most ``window`` chunks, or None if all are there."""
        start = self._there.find(0)
        if start < 0:
            return None
        end = min(start + window, self.count)
        stop = self._there.find(1, start, end)
        return start, stop if stop >= 0 else end

    def add(self, chunk: Chunk) -> bool:
        """Take a chunk; False if it belongs to another blob, does not fit, or is there already."""
        if chunk.blob != self.ref.hash or not self.missing_in(chunk.index, chunk.index + 1):
            return False
        offset = chunk.index * self.ref.chunk
        if len(chunk.data) != min(self.ref.chunk, self.ref.size - offset):
            return False
        self._storage.put(chunk.index, chunk.data)
        self._there[chunk.index] = 1
        self._left -= 1
        return True

    def finish(self) -> bytes:
        """The whole blob, verified. Its chunks are forgotten if it is not what was announced.

        Raises:
            ProtocolError: chunks are missing, or the SHA-256 differs.
        """
        data = b"" if self._left else self._storage.whole()
        if self._left or sha256(data) != self.ref.hash:
            self._there, self._left = bytearray(self.count), self.count
            self._storage.clear()
            raise ProtocolError("a blob is not the one that was announced: its SHA-256 differs")
        return data


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]
