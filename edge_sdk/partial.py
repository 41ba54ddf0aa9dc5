"""An unfinished transfer on disk: what has come is not asked for again after a crash or a reboot."""

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
UNWRITABLE = "this device's work folder cannot be written: {}: make room on its disk"
_HEADER = struct.Struct(">QQ")


class Partial:
    """The chunks of one blob in ``folder``; a storage of an ``Incoming``.

    ``<hash>.part`` has the bytes in their places, ``<hash>.map`` the sizes of blob and chunk and a bit for
    each chunk, which is set once that is durable. Nothing of it is believed: the whole is hashed at the end.
    No file stays open, since a server has thousands of these.

    Args:
        unwritable: the sentence for files that cannot be written, with ``{}`` for the reason.

    Raises:
        RunError: here and in every method: the files cannot be written.
    """

    def __init__(self, folder: Path, ref: Ref, *, unwritable: str = UNWRITABLE) -> None:
        self._ref, self._unwritable = ref, unwritable
        self._path = folder / f"{ref.hash}.part"
        header, bits = _HEADER.pack(ref.size, ref.chunk), -(-chunk_count(ref) // 8)
        with writing(unwritable):
            folder.mkdir(parents=True, exist_ok=True)
        with self._opened(".map") as file:
            kept = os.pread(file, len(header) + bits, 0)
        self._bits = bytearray(kept[len(header) :])
        self._unflushed = 0
        if not kept.startswith(header) or len(self._bits) != bits:
            self._bits = bytearray(bits)
            if kept:
                self.clear()

    def held(self) -> Iterator[int]:
        """The chunks that an earlier transfer has left."""
        return (index for index in range(chunk_count(self._ref)) if self._bits[index // 8] >> index % 8 & 1)

    def put(self, index: int, part: bytes) -> None:
        """Write a chunk into its place."""
        with self._opened(".part") as file:
            written = os.pwrite(file, part, index * self._ref.chunk)
            # A disk may be full in the middle of a chunk; the rest says so.
            os.pwrite(file, part[written:], index * self._ref.chunk + written)
        self._bits[index // 8] |= 1 << index % 8
        self._unflushed += 1
        if self._unflushed == FLUSH_EVERY:
            self._flush()

    def whole(self) -> bytes:
        """All bytes, for the caller to verify."""
        with writing(self._unwritable):
            return self._path.read_bytes()

    def clear(self) -> None:
        """Forget all chunks."""
        self._bits = bytearray(len(self._bits))
        with self._opened(".part") as file:
            os.ftruncate(file, 0)
        self._flush()

    def close(self) -> None:
        """Make what has come durable; another object may go on with it."""
        if self._unflushed:
            self._flush()

    def _flush(self) -> None:
        self._unflushed = 0
        with self._opened(".part") as file:
            os.fsync(file)
        # Only now: a bit without its chunk would cost the whole transfer.
        with self._opened(".map") as file:
            os.pwrite(file, _HEADER.pack(self._ref.size, self._ref.chunk) + self._bits, 0)
            os.fsync(file)

    @contextlib.contextmanager
    def _opened(self, suffix: str) -> Iterator[int]:
        with writing(self._unwritable):
            file = os.open(self._path.with_suffix(suffix), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                yield file
            finally:
                os.close(file)


@contextlib.contextmanager
def writing(unwritable: str = UNWRITABLE) -> Iterator[None]:
    """Tell of a full or broken disk as RunError; it names no path, since a decline takes it to the server."""
    try:
        yield
    except OSError as error:
        logger.warning("the work folder: %s", error)
        raise RunError(unwritable.format(error.strerror)) from None
