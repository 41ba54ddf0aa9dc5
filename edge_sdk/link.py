"""One device's end of the wire: typed messages over a transport, presence, and a new nonce a connection."""

from __future__ import annotations

import logging
import secrets
from typing import TypeAlias

from edge_sdk.errors import ProtocolError
from edge_sdk.protocol import Chunk, Topics, decode_chunk, encode_chunk
from edge_sdk.protocol.messages import FromServer, Leave, Message, Ref, decode_from_server, encode, kind_of
from edge_sdk.transport import Connected, Disconnected, Received, Transport, Will

logger = logging.getLogger(__name__)

Incoming: TypeAlias = FromServer | Chunk | Connected | Disconnected


class Link:
    """Sends as one device and receives what is meant for it. ``send`` may be called by any thread.

    Args:
        transport: not yet connected.
        topics: of the fleet.
        device: the device's id, already checked.
    """

    def __init__(self, transport: Transport, topics: Topics, device: str) -> None:
        self._transport = transport
        self._topics = topics
        self.device = device
        self.nonce = ""

    def open(self, *, timeout: float) -> None:
        """Connect with a will and subscribe; BrokerError if that fails within ``timeout`` seconds."""
        self._transport.connect(self._will, timeout=timeout)
        self._transport.subscribe(self._topics.down(self.device, "+"))
        self._transport.subscribe(self._topics.all("+"))

    def close(self) -> None:
        """Say goodbye and disconnect."""
        self.send(Leave(nonce=self.nonce))
        self._transport.close()

    def send(self, message: Message) -> None:
        """Send a control message to the server."""
        self._transport.publish(self._topics.up(self.device, kind_of(message)), encode(message))

    def send_chunks(self, ref: Ref, data: bytes, start: int, stop: int) -> None:
        """Send the chunks ``start`` to ``stop`` − 1 of a blob that the server has granted."""
        for index in range(start, stop):
            self._transport.publish(self._topics.up(self.device, "chunk"), encode_chunk(ref, data, index))

    def subscribe_block(self, blob: str, block: int) -> None:
        """Begin to take one block of a published blob."""
        self._transport.subscribe(self._topics.block(blob, block))

    def unsubscribe_block(self, blob: str, block: int) -> None:
        """Have done with a block."""
        self._transport.unsubscribe(self._topics.block(blob, block))

    def receive(self, timeout: float) -> Incoming | None:
        """The next thing for this device, or None after ``timeout`` seconds; what is malformed is dropped."""
        event = self._transport.receive(timeout)
        if not isinstance(event, Received):
            return event
        address = self._topics.parse(event.topic)
        if address is None or address.direction == "up":
            return None
        if event.retained and address.direction != "model":
            logger.warning("dropped a retained message on %s: clear it", event.topic)
            return None
        try:
            if address.kind == "chunk":
                return decode_chunk(event.payload)
            return decode_from_server(address.kind, event.payload)
        except ProtocolError as error:
            logger.warning("dropped a message on %s: %s", event.topic, error)
            return None

    def _will(self) -> Will:
        self.nonce = secrets.token_hex(8)
        return Will(self._topics.up(self.device, "leave"), encode(Leave(nonce=self.nonce)))
