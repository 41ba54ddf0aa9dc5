"""As much of an MQTT broker as one transport needs, which misbehaves as a test wants it to."""

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK = 1, 2, 3, 4, 8, 9, 10, 11
PINGREQ, PINGRESP, DISCONNECT = 12, 13, 14


def packet(kind, body, flags=0):
    """An MQTT control packet: fixed header with the length in base 128, and the body."""
    left, length = len(body), b""
    while True:
        left, digit = divmod(left, 128)
        length += bytes([digit | (0x80 if left else 0)])
        if not left:
            return bytes([kind << 4 | flags]) + length + body


@dataclass
class FakeBroker:
    """Listens until ``close``.

    Args:
        levels: protocol levels that it speaks; it hangs up on others.
        answers: reason codes of its first CONNACKs; 0 afterwards.
        properties: of its CONNACK in MQTT 5.
        acknowledges: whether it sends PUBACKs.
        puback: reason code of its PUBACKs, and ``suback`` of its SUBACKs.
        largest: bytes of a packet on which it still does not hang up.
    """

    levels: tuple = (4, 5)
    answers: list = field(default_factory=list)
    properties: bytes = b""
    acknowledges: bool = True
    puback: int = 0
    suback: int = 1
    largest: int = 1 << 30

    def __post_init__(self):
        self.connects, self.published, self._open = [], [], []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.close()
        self.cut()

    def cut(self):
        """End all connections."""
        while self._open:
            with contextlib.suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def send(self, data):
        """Send bytes on all connections."""
        for connection in self._open:
            connection.sendall(data)

    def publish(self, topic, payload, retain=False):
        """Send a message at QoS 0, in MQTT 5."""
        body = struct.pack("!H", len(topic)) + topic + b"\x00" + payload
        self.send(packet(PUBLISH, body, flags=int(retain)))

    def _accept(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        stream = connection.makefile("rb")
        try:
            with connection:
                while self._answer(connection, stream):
                    pass
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            return
        finally:
            if connection in self._open:
                self._open.remove(connection)

    def _answer(self, connection, stream):
        kind, body = self._read(stream)
        mid = body[:2]
        if kind is None or kind == DISCONNECT:
            return False
        if kind == CONNECT:
            level = body[6]
            if level not in self.levels:
                return False
            code = self.answers.pop(0) if self.answers else 0
            five = bytes([len(self.properties)]) + self.properties if level == 5 else b""
            self.level = level
            self.connects.append(body)
            connection.sendall(packet(CONNACK, bytes([0, code]) + five))
            if code:
                return False
            self._open.append(connection)
        elif kind == PUBLISH:
            length = struct.unpack("!H", body[:2])[0]
            mid, skip = body[2 + length : 4 + length], 1 if self.level == 5 else 0
            self.published.append(
                (len(self.connects), body[2 : 2 + length].decode(), body[4 + length + skip :])
            )
            if self.acknowledges:
                connection.sendall(packet(PUBACK, mid + (bytes([self.puback]) if self.puback else b"")))
        elif kind == SUBSCRIBE:
            connection.sendall(
                packet(SUBACK, mid + (b"\x00" if self.level == 5 else b"") + bytes([self.suback]))
            )
        elif kind == UNSUBSCRIBE:
            connection.sendall(packet(UNSUBACK, mid + (b"\x00\x00" if self.level == 5 else b"")))
        elif kind == PINGREQ:
            connection.sendall(packet(PINGRESP, b""))
        return True

    def _read(self, stream):
        """The kind and the body of the next packet; None for one that is too large, or none."""
        head = stream.read(1)
        if not head:
            return None, b""
        length, shift = 0, 0
        while True:
            digit = stream.read(1)[0]
            length += (digit & 0x7F) << shift
            shift += 7
            if not digit & 0x80:
                break
        if length > self.largest:
            return None, b""
        return head[0] >> 4, stream.read(length)
