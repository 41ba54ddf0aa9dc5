"""Models and bundles for all devices: published once, retained in blocks; asked for chunk by chunk else."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from edge_sdk.errors import RunError
from edge_sdk.protocol import Topics, chunk_count, encode_chunk, reference
from edge_sdk.protocol.messages import Grant, Ref
from edge_sdk.protocol.transfer import HEADER_BYTES
from edge_sdk.transport import Transport

ASKED_AT_ONCE = 32
"""Chunks that wait to be sent to one device."""
RATE = 512
"""Chunks a second that all devices together get by asking."""
BURST = 128
"""Chunks that are sent at once after a pause."""
MOST_ASKING = 10_000
"""Devices that may wait for chunks."""
TOPIC_BYTES = 256
"""Room for the longest topic of a chunk."""


class Publication:
    """The blobs that are out, on the topics of one fleet.

    Where the broker keeps no retained messages nothing is published, and the references tell devices to ask.

    Args:
        chunk: bytes of a chunk.
        known: whether a device is one of the fleet's; others get nothing.
    """

    def __init__(
        self,
        transport: Transport,
        topics: Topics,
        *,
        chunk: int,
        known: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._transport = transport
        self._topics = topics
        self._chunk = chunk
        self._known = known
        self._asked: dict[str, Grant] = {}
        self._allowance = float(BURST)
        self._counted_at: float | None = None
        self._blobs: dict[str, tuple[Ref, bytes]] = {}
        self._lent: dict[str, tuple[Ref, bytes]] = {}

    def fit(self, max_payload: int) -> None:
        """Cut blobs so that a chunk with header and topic fits ``max_payload`` bytes.

        Raises:
            RunError: that leaves less than 1 KiB a chunk.
        """
        self._chunk = min(self._chunk, max_payload - HEADER_BYTES - TOPIC_BYTES)
        if self._chunk < 1024:
            raise RunError(
                f"the broker takes {max_payload} bytes a message, too few for a chunk: raise its limit"
            )

    def announce(self, data: bytes) -> Ref:
        """Take a blob up; returns its reference. Nothing is sent yet, so that it can be recorded first."""
        ref = reference(data, chunk=self._chunk)
        if not self._transport.can_retain:
            ref = msgspec.structs.replace(ref, sources=("ask",))
        self._blobs[ref.hash] = ref, data
        return ref

    def send(self, ref: Ref) -> None:
        """Publish a blob's chunks, retained; nothing where the broker does not retain."""
        if not self._transport.can_retain:
            return
        _, data = self._blobs[ref.hash]
        for index in range(chunk_count(ref)):
            self._transport.publish(
                self._topics.chunk(ref.hash, index), encode_chunk(ref, data, index), retain=True
            )

    def send_all(self) -> None:
        """Publish all blobs, at the start and when the broker may have lost them."""
        for ref in self.refs:
            self.send(ref)

    def withdraw(self, ref: Ref) -> None:
        """Clear a blob from the broker."""
        self._blobs.pop(ref.hash, None)
        for index in range(chunk_count(ref)):
            self._transport.publish(self._topics.chunk(ref.hash, index), b"", retain=True)

    def lend(self, data: bytes) -> Ref:
        """Keep a blob for those who ask for it; it is not published."""
        ref = msgspec.structs.replace(reference(data, chunk=self._chunk), sources=("ask",))
        self._lent[ref.hash] = ref, data
        return ref

    def take_back(self, ref: Ref) -> None:
        """Lend a blob no longer."""
        self._lent.pop(ref.hash, None)

    def serve(self, device: str, grant: Grant, now: float | None = None) -> None:
        """Note the chunks that a device asks for, and send what may be sent now.

        A blob that is neither out nor lent is not sent, and a device that is not known gets nothing. One
        range waits for a device: a grant that touches it adds to it, another takes its place.

        Args:
            now: monotonic seconds; the present by default.
        """
        waiting = self._asked.get(device)
        if self._known(device) and (waiting is not None or len(self._asked) < MOST_ASKING):
            self._asked[device] = _bounded(grant) if waiting is None else _merged(waiting, grant)
        self.tick(time.monotonic() if now is None else now)

    def tick(self, now: float) -> None:
        """Send devices what they have asked for, a chunk each in turn, as fast as is allowed.

        It does not wait for the broker: while too much is outstanding nothing is sent.
        """
        if self._counted_at is not None:
            self._allowance = min(self._allowance + max(now - self._counted_at, 0.0) * RATE, BURST)
        self._counted_at = now
        while self._asked and self._allowance >= 1 and self._transport.room:
            device = next(iter(self._asked))
            grant = self._asked.pop(device)
            found = self._blobs.get(grant.blob) or self._lent.get(grant.blob)
            if found is None or grant.start >= min(grant.stop, chunk_count(found[0])):
                continue
            chunk = encode_chunk(*found, grant.start)
            self._transport.publish(self._topics.down(device, "chunk"), chunk)
            self._allowance -= 1
            if grant.start + 1 < grant.stop:
                # At the end of the line: whoever asks for much waits for the others.
                self._asked[device] = msgspec.structs.replace(grant, start=grant.start + 1)

    @property
    def waiting(self) -> bool:
        """Whether chunks wait to be sent by :meth:`tick`."""
        return bool(self._asked)

    @property
    def refs(self) -> list[Ref]:
        """What is out."""
        return [ref for ref, _ in self._blobs.values()]


def _merged(waiting: Grant, grant: Grant) -> Grant:
    touching = grant.start <= waiting.stop and waiting.start <= grant.stop
    if grant.blob != waiting.blob or not touching:
        return _bounded(grant)
    start = min(waiting.start, grant.start)
    return _bounded(msgspec.structs.replace(grant, start=start, stop=max(waiting.stop, grant.stop)))


def _bounded(grant: Grant) -> Grant:
    return msgspec.structs.replace(grant, stop=min(grant.stop, grant.start + ASKED_AT_ONCE))
