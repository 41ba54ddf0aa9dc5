"""One connection to a broker by paho, from its CONNECT to its end.

A connection that is lost is replaced by a new one, with a client of its own: nothing that was queued is sent
again, the session is clean, and the broker's window is empty.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edge_sdk.transport.events import Received, Will
from edge_sdk.transport.outstanding import Outstanding, StalledError

logger = logging.getLogger(__name__)

IN_FLIGHT = 20
"""Messages that the broker gets before it has acknowledged one; fewer where it says so."""
ENVELOPE = 512
"""Bytes that a packet may have beside topic and payload."""
_STEP = 0.5

_KEEPALIVE_TIMEOUT = 141
_TOO_LARGE = 149
_UNSPECIFIED = 128
_FIXES = {
    _UNSPECIFIED: "does its ACL allow it?",
    135: "does its ACL allow it?",
    _TOO_LARGE: "set chunk_bytes lower",
    151: "its quota for this client is used up",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Where the broker is, and who we are to it; ``certified`` if by a certificate of our own."""

    host: str
    port: int
    context: ssl.SSLContext | None
    username: str | None
    password: str | None
    certified: bool
    keepalive: int


class RefusedConnection(Exception):  # noqa: N818 - not an error yet: another version may be taken
    """There is somebody, but no connection.

    Attributes:
        code: the reason code of an MQTT 5 CONNACK, or what stands for one of 3.1.1; 0 if none has come.
        hung_up: it closed the connection in place of a CONNACK.
    """

    def __init__(self, reason: str, *, code: int = 0, hung_up: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.hung_up = hung_up


class Connection:
    """Made by :meth:`open`, carried by :meth:`run` in one thread; the rest is for any thread.

    Args:
        client_id: of this connection alone.
        max_payload: bytes beyond which a message is not taken in.
        outstanding: its unacknowledged messages.
        on_message: called in the thread that runs the connection; it must not wait.
    """

    def __init__(
        self,
        account: Account,
        *,
        version: MQTTProtocolVersion,
        client_id: str,
        will: Will | None,
        max_payload: int,
        outstanding: Outstanding,
        on_message: Callable[[Received], None],
    ) -> None:
        self._account = account
        self._max_payload = max_payload
        self._on_received = on_message
        self.outstanding = outstanding
        self._accepted: Properties | None = None
        self._refusal: RefusedConnection | None = None
        self._reason: str | None = None
        self._refused: Counter[int] = Counter()
        self._subscribing: dict[int, list[str]] = {}
        self._lock = threading.Lock()
        self.hung_up = False
        self.held = 0.0
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=version, reconnect_on_failure=False
        )
        if account.username is not None:
            client.username_pw_set(account.username, account.password)
        if account.context is not None:
            client.tls_set_context(account.context)
        if will is not None:
            client.will_set(will.topic, will.payload, qos=1)
        client.max_inflight_messages = IN_FLIGHT
        client.on_socket_open = _send_at_once
        # Without it paho writes to the socket in whichever thread publishes.
        client.on_socket_register_write = lambda *_: None
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        self._client: mqtt.Client | None = client

    # The thread that carries the connection.

    def open(self, deadline: float, patience: float) -> Properties:
        """Connect and wait for the CONNACK; returns its properties, empty in MQTT 3.1.1.

        Args:
            deadline: monotonic second; a second is left at least.
            patience: seconds to wait for the CONNACK at most.

        Raises:
            OSError, ValueError: nobody is there, or TLS fails.
            RefusedConnection: what is there does not accept us.
        """
        client = self._client
        assert client is not None
        try:
            client.connect_timeout = max(deadline - time.monotonic(), 1.0)
            client.connect(
                self._account.host,
                self._account.port,
                self._account.keepalive,
                **self._options(client.protocol),
            )
            wait = max(min(deadline - time.monotonic(), patience), 1.0)
            deadline = time.monotonic() + wait
            while self._accepted is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RefusedConnection(f"no CONNACK within {wait:.0f} s")
                self._step(client, min(left, _STEP))
                if self._refusal is not None:
                    raise self._refusal
                if self._accepted is None and self._reason is not None:
                    early = f"it hung up before its CONNACK ({self._reason})"
                    raise RefusedConnection(early if self.hung_up else self._reason, hung_up=self.hung_up)
        except BaseException:
            self._shut()
            raise
        self._opened = time.monotonic()
        return self._accepted

    def run(self) -> str:
        """Carry messages until the connection ends; returns why it has."""
        client = self._client
        assert client is not None
        try:
            while self._reason is None:
                self._step(client, _STEP)
        finally:
            self._shut()
        self.held = time.monotonic() - self._opened
        for code, count in self._refused.items():
            if count > 1:
                logger.warning("the broker has refused %d messages (reason code %d)", count, code)
        return self._reason

    def _step(self, client: mqtt.Client, timeout: float) -> None:
        try:
            code = client.loop(timeout)
        except Exception as error:
            # Of a callback of ours, or of paho on bytes that are no MQTT: neither may end the thread.
            logger.exception("the connection to the broker is given up")
            self.end(f"what came from it could not be taken ({type(error).__name__}: {error})")
            return
        if code != mqtt.MQTT_ERR_SUCCESS:
            self.end(mqtt.error_string(code))

    def _shut(self) -> None:
        self.outstanding.end()
        client, self._client = self._client, None
        connection = client.socket() if client is not None else None
        if connection is not None:
            connection.close()

    def _options(self, version: MQTTProtocolVersion) -> dict[str, Any]:
        if version != MQTTProtocolVersion.MQTTv5:
            return {}
        limits = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        limits.MaximumPacketSize = self._max_payload + ENVELOPE
        return {"clean_start": True, "properties": limits}

    # Any thread.

    def end(self, reason: str) -> None:
        """Give the connection up, soon; the first reason counts. The broker publishes the will."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
        self.outstanding.end()

    def say_goodbye(self) -> None:
        """End the connection when what is queued has been sent; the broker drops the will."""
        if (client := self._client) is not None:
            client.disconnect()

    def publish(self, topic: str, payload: bytes, *, retain: bool, patience: float) -> None:
        """Queue a message; dropped if the connection ends before there is a place for it."""
        try:
            number = self.outstanding.reserve(topic, len(topic) + len(payload), patience, retain=retain)
        except StalledError:
            self.end(f"it acknowledges nothing for {patience:.0f} s")
            return
        client = self._client
        if number is None or client is None:
            return
        try:
            info = client.publish(topic, payload, qos=1, retain=retain)
        except ValueError:
            self.outstanding.give_up(number)
            raise
        self.outstanding.sent(number, info.mid)

    def subscribe(self, patterns: Iterable[str]) -> None:
        """Subscribe to some topics at QoS 1."""
        client, topics = self._client, sorted(patterns)
        if client is None or not topics:
            return
        with self._lock:
            _, mid = client.subscribe([(pattern, 1) for pattern in topics])
            if mid is not None:
                self._subscribing[mid] = topics

    def unsubscribe(self, pattern: str) -> None:
        """End a subscription."""
        if (client := self._client) is not None:
            client.unsubscribe(pattern)

    # paho's callbacks, in the thread that carries the connection.

    def _on_connect(
        self, _client: mqtt.Client, _data: Any, _flags: Any, code: ReasonCode, properties: Properties | None
    ) -> None:
        if code.is_failure:
            self._refusal = RefusedConnection(f"{code} (reason code {code.value})", code=code.value)
            return
        window = getattr(properties, "ReceiveMaximum", IN_FLIGHT)
        if window < IN_FLIGHT:
            self.outstanding.bound(window)
        self._accepted = properties or Properties(PacketTypes.CONNACK)  # type: ignore[no-untyped-call]

    def _on_disconnect(
        self, _client: mqtt.Client, _data: Any, flags: Any, code: ReasonCode, _properties: Properties | None
    ) -> None:
        reason = str(code)
        if code.value == _KEEPALIVE_TIMEOUT:
            reason = "it does not answer"
        elif code.value == _TOO_LARGE:
            reason = f"{code}: {_FIXES[_TOO_LARGE]}"
        elif code.value == _UNSPECIFIED and not flags.is_disconnect_packet_from_server:
            reason = "it is cut off"
        self.hung_up = code.value != _KEEPALIVE_TIMEOUT and self._reason is None
        self.end(reason)

    def _on_message(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            logger.warning("dropped a message whose topic is not UTF-8")
            return
        if len(message.payload) > self._max_payload:
            logger.warning("dropped a message of %d bytes on %s", len(message.payload), topic)
            return
        self._on_received(Received(topic, bytes(message.payload), message.retain))

    def _on_publish(
        self, _client: mqtt.Client, _data: Any, mid: int, code: ReasonCode, _properties: Properties
    ) -> None:
        topic = self.outstanding.acknowledged(mid, taken=not code.is_failure)
        if code.is_failure:
            self._on_refused(topic, code)

    def _on_subscribe(
        self,
        _client: mqtt.Client,
        _data: Any,
        mid: int,
        codes: list[ReasonCode],
        _properties: Properties | None,
    ) -> None:
        with self._lock:
            topics = self._subscribing.pop(mid, [])
        for topic, code in zip(topics, codes, strict=False):
            if code.is_failure:
                self._on_refused(topic, code)

    def _on_refused(self, topic: str, code: ReasonCode) -> None:
        self._refused[code.value] += 1
        if self._refused[code.value] == 1:
            fix = _FIXES.get(code.value, "see its log")
            logger.warning(
                "the broker refuses %s (%s, reason code %d): %s", topic or "a message", code, code.value, fix
            )


def _send_at_once(_client: mqtt.Client, _data: Any, connection: Any) -> None:
    # Our messages are small and each waits for an answer: Nagle's algorithm would add 40 ms to every one.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
