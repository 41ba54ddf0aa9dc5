"""Models and bundles for all devices: published once, retained in blocks; asked for chunk by chunk else."""

from __future__ import annotations

import msgspec

from edge_sdk.errors import RunError
from edge_sdk.protocol import Topics, chunk_count, encode_chunk, reference
from edge_sdk.protocol.messages import Grant, Ref
from edge_sdk.protocol.transfer import HEADER_BYTES
from edge_sdk.transport import Transport

ASKED_AT_ONCE = 32
TOPIC_BYTES = 256
"""Room for the longest topic of a chunk."""


class Publication:
    """The blobs that are out, on the topics of one fleet."""

    def __init__(self, transport: Transport, topics: Topics, *, chunk: int) -> None:
        self._transport = transport
        self._topics = topics
        self._chunk = chunk
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
        self._blobs[ref.hash] = ref, data
        return ref

    def send(self, ref: Ref) -> None:
        """Publish a blob's chunks, retained."""
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

    def serve(self, device: str, grant: Grant) -> None:
        """Send a device the chunks that it asks for; a blob that is neither out nor lent is not sent."""
        found = self._blobs.get(grant.blob) or self._lent.get(grant.blob)
        if found is None:
            return
        ref, data = found
        stop = min(grant.stop, grant.start + ASKED_AT_ONCE, chunk_count(ref))
        for index in range(grant.start, stop):
            self._transport.publish(self._topics.down(device, "chunk"), encode_chunk(ref, data, index))

    @property
    def refs(self) -> list[Ref]:
        """What is out."""
        return [ref for ref, _ in self._blobs.values()]
