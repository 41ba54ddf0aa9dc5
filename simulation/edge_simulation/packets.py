"""The packets of MQTT 3.1.1 and 5 that a proxy must tell apart."""

from __future__ import annotations

import struct
from dataclasses import dataclass

CONNECT, PUBLISH, PUBACK, DISCONNECT = 1, 3, 4, 14
"""Types, the upper half of a packet's first byte."""


@dataclass(frozen=True, slots=True)
class Publish:
    """A PUBLISH packet taken apart: ``id`` is None at QoS 0, and else the two bytes at ``id_at``."""

    packet: bytes
    qos: int
    topic: str
    id: int | None
    id_at: int
    payload: bytes

    def with_id(self, number: int) -> bytes:
        """The packet with another id."""
        return self.packet[: self.id_at] + struct.pack(">H", number) + self.packet[self.id_at + 2 :]


def take_packet(buffer: bytearray) -> bytes:
    """Take the first packet off ``buffer``; empty if it is not whole yet.

    Raises:
        ConnectionError: what is there is no MQTT.
    """
    if len(buffer) < 2:
        return b""
    end = _variable(buffer, 1)
    if end is None:
        return b""
    size, at = end
    if len(buffer) < at + size:
        return b""
    packet = bytes(buffer[: at + size])
    del buffer[: at + size]
    return packet


def read_connect(packet: bytes) -> tuple[int, str]:
    """Protocol version (4 is 3.1.1) and client id of a CONNECT packet."""
    _, at = _variable(packet, 1) or (0, 2)
    _name, at = _text(packet, at)
    version, at = packet[at], at + 4  # flags, keep-alive
    if version == 5:
        size, at = _variable(packet, at) or (0, at)
        at += size
    return version, _text(packet, at)[0]


def read_puback(packet: bytes) -> int:
    """The id that a PUBACK acknowledges."""
    return int.from_bytes(packet[2:4], "big")


def read_publish(packet: bytes, version: int) -> Publish:
    """A whole PUBLISH packet of MQTT ``version``, taken apart."""
    _, at = _variable(packet, 1) or (0, 2)
    topic, at = _text(packet, at)
    qos, number, id_at = packet[0] >> 1 & 3, None, at
    if qos:
        (number,), at = struct.unpack_from(">H", packet, at), at + 2
    if version == 5:
        size, at = _variable(packet, at) or (0, at)
        at += size
    return Publish(packet, qos, topic, number, id_at, packet[at:])


def _variable(data: bytes | bytearray, at: int) -> tuple[int, int] | None:
    """A variable byte integer at ``at`` and where it ends; None if it is not whole yet."""
    value = 0
    for digit in range(4):
        if at + digit >= len(data):
            return None
        value |= (data[at + digit] & 127) << 7 * digit
        if data[at + digit] < 128:
            return value, at + digit + 1
    raise ConnectionError("a length of more than four bytes: this is no MQTT")


def _text(packet: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">H", packet, at)
    return packet[at + 2 : at + 2 + size].decode(errors="replace"), at + 2 + size
