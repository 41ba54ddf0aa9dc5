"""The server's end of the wire: typed messages to and from the devices of one fleet."""

from __future__ import annotations

import logging
from typing import TypeAlias

from edge_sdk.errors import ProtocolError
from edge_sdk.protocol import Chunk, Topics, decode_chunk
from edge_sdk.protocol.messages import (
    FromDevice,
    Message,
    Who,
    decode_from_device,
    decode_from_server,
    encode,
    kind_of,
)
from edge_sdk.transport import Connected, Disconnected, Received, Transport

logger = logging.getLogger(__name__)

FromDevices: TypeAlias = tuple[str, FromDevice | Chunk]
"""A device's id and what it says."""


class Desk:
    """Tells devices things and hears what they say; what is malformed is dropped and logged."""

    def __init__(self, transport: Transport, topics: Topics) -> None:
        self._transport = transport
        self._topics = topics

    def open(self, *, timeout: float) -> None:
        """Connect and subscribe; BrokerError if that fails within ``timeout`` seconds."""
        self._transport.connect(None, timeout=timeout)
        self._transport.subscribe(self._topics.up("+", "+"))
        self._transport.subscribe(self._topics.all("who"))

    def tell(self, device: str, message: Message) -> None:
        """Send a message to one device."""
        self._transport.publish(self._topics.down(device, kind_of(message)), encode(message))

    def tell_all(self, message: Message) -> None:
        """Send a message to every device that is connected."""
        self._transport.publish(self._topics.all(kind_of(message)), encode(message))

    def receive(self, timeout: float) -> FromDevices | Who | Connected | Disconnected | None:
        """The next thing that a device or a server says, or that happens to the connection.

        None after ``timeout`` seconds.
        """
        event = self._transport.receive(timeout)
        if not isinstance(event, Received):
            return event
        if event.retained:
            # Nobody speaks to the server so: it would be heard anew, as if now, at every reconnect.
            logger.warning("dropped a retained message on %s: clear it", event.topic)
            return None
        address = self._topics.parse(event.topic)
        if address is None or address.direction not in ("up", "all"):
            return None
        try:
            if address.direction == "all":
                message = decode_from_server(address.kind, event.payload)
                return message if isinstance(message, Who) else None
            if address.kind == "chunk":
                return address.device, decode_chunk(event.payload)
            return address.device, decode_from_device(address.kind, event.payload)
        except ProtocolError as error:
            logger.warning("dropped a message on %s: %s", event.topic, error)
            return None
