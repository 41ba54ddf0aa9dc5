"""An unfinished download on disk: what has come is not asked for again after a crash or a reboot."""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from edge_sdk.errors import RunError
from edge_sdk.protocol import chunk_count
from edge_sdk.protocol.messages import Ref

logger = logging.getLogger(__name__)

FLUSH_EVERY = 16
"""Chunks after which what has come is made durable; a crash loses fewer."""
_HEADER = struct.Struct(">QQ")


class Partial:
    """The chunks of one blob in ``folder``, open until :meth:`close`; a storage of an ``Incoming``.

    ``<hash>.part`` has the bytes in their places, ``<hash>.map`` the sizes of blob and chunk and a bit for
    each chunk, which is set once that is durable. Nothing of it is believed: the whole is hashed at the end.

    Raises:
        RunError: here and in every method: the files cannot be written.
    """

    def __init__(self, folder: Path, ref: Ref) -> None:
        self._ref = ref
        self._path = folder / f"{ref.hash}.part"
        header, bits = _HEADER.pack(ref.size, ref.chunk), -(-chunk_count(ref) // 8)
        with writing():
            folder.mkdir(parents=True, exist_ok=True)
            self._data = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            self._map = os.open(self._path.with_suffix(".map"), os.O_RDWR | os.O_CREAT, 0o600)
            kept = os.pread(self._map, len(header) + bits, 0)
        self._bits = bytearray(kept[len(header) :])
        self._unflushed = 0
        if not kept.startswith(header) or len(self._bits) != bits:
            self._bits = bytearray(bits)
            self.clear()

    def held(self) -> Iterator[int]:
        """The chunks that an earlier download has left."""
        return (index for index in range(chunk_count(self._ref)) if self._bits[index // 8] >> index % 8 & 1)

    def put(self, index: int, part: bytes) -> None:
        """Write a chunk into its place."""
        with writing():
            written = os.pwrite(self._data, part, index * self._ref.chunk)
            # A disk may be full in the middle of a chunk; the rest says so.
            os.pwrite(self._data, part[written:], index * self._ref.chunk + written)
        self._bits[index // 8] |= 1 << index % 8
        self._unflushed += 1
        if self._unflushed == FLUSH_EVERY:
            self._flush()

    def whole(self) -> bytes:
        """All bytes, for the caller to verify."""
        with writing():
            return self._path.read_bytes()

    def clear(self) -> None:
        """Forget all chunks."""
        self._bits = bytearray(len(self._bits))
        with writing():
            os.ftruncate(self._data, 0)
        self._flush()

    def close(self) -> None:
        """Make what has come durable; another object may go on with it."""
        try:
            self._flush()
        finally:
            os.close(self._data)
            os.close(self._map)

    def _flush(self) -> None:
        self._unflushed = 0
        with writing():
            os.fsync(self._data)
            # Only now: a bit without its chunk would cost the whole download.
            os.pwrite(self._map, _HEADER.pack(self._ref.size, self._ref.chunk) + self._bits, 0)
            os.fsync(self._map)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Tell of a full or broken disk as RunError; it names no path, since a decline takes it to the server."""
    try:
        yield
    except OSError as error:
        logger.warning("the work folder: %s", error)
        raise RunError(
            f"this device's work folder cannot be written: {error.strerror}: make room on its disk"
        ) from None
