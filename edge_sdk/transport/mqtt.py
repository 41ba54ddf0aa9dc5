"""MQTT by paho: version 5 by preference, 3.1.1 where the broker has no 5.

Sessions are clean and everything is QoS 1: what was missed is asked for again by our own messages.
"""

from __future__ import annotations

import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edge_sdk.errors import BrokerError, ProtocolError
from edge_sdk.transport.events import Connected, Disconnected, Event, Received, Transport, Will

MAX_PAYLOAD = 128 << 10
KEEPALIVE = 20
MAX_WAITING = 10_000
"""Messages that may wait to be received before further ones are dropped."""
MAX_OUTSTANDING = 256
"""Messages that may wait for their PUBACK before ``publish`` waits too."""

# Refusals that another protocol version cannot cure: bad login, not authorised, banned, bad client id.
_FINAL = {133, 134, 135, 138, 140, 144}
_FALLBACK_AFTER = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Who we are to the broker, and how we know it.

    Args:
        username: and ``password``: the broker's login; those in the URL by default.
        ca: PEM file of the certificate authority; the system's by default.
        cert: PEM file of our certificate, with its ``key``, for mutual TLS.
    """

    username: str | None = None
    password: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str
    final: bool = False


class MqttTransport(Transport):
    """A connection to the broker at ``url`` (``mqtt://host:1883`` or ``mqtts://host:8883``).

    Args:
        url: may carry user and password.
        name: the beginning of the client id, to be told apart in the broker's log.
        credentials: login and TLS files.
        max_payload: largest payload of a message in bytes; a smaller limit of the broker's wins.

    Raises:
        BrokerError: the URL is not one of a broker, or a TLS file cannot be read.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "edge",
        credentials: Credentials | None = None,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        self._host, self._port, self._tls, self._credentials = _parse(url, credentials or Credentials())
        self._tls_context = _tls_context(self._credentials) if self._tls else None
        self._name = name
        self._max_payload = max_payload
        self._events: queue.Queue[Event] = queue.Queue()
        self._patterns: set[str] = set()
        self._lock = threading.Lock()
        self._outstanding = threading.Condition()
        self._unacknowledged = 0
        self._client: mqtt.Client | None = None
        self._will: Callable[[], Will] | None = None
        self._answer: queue.Queue[_Refusal | None] = queue.Queue()

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes: ours, or the broker's where that is smaller."""
        return self._max_payload

    def connect(self, will: Callable[[], Will] | None, *, timeout: float) -> None:
        """Connect with MQTT 5, then with 3.1.1 if the broker refuses 5 or hangs up before its CONNACK.

        Raises:
            BrokerError: unreachable within ``timeout`` seconds, or refused; says which.
        """
        self._will = will
        deadline = time.monotonic() + timeout
        refusal = self._try(MQTTProtocolVersion.MQTTv5, min(timeout, _FALLBACK_AFTER))
        if refusal is not None and not refusal.final:
            left = max(deadline - time.monotonic(), 1.0)
            refusal = self._try(MQTTProtocolVersion.MQTTv311, left)
        if refusal is not None:
            raise BrokerError(
                f"the broker at {self._host}:{self._port} refuses the connection: {refusal.reason}"
            )

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue a message at QoS 1; waits while :data:`MAX_OUTSTANDING` are not acknowledged.

        While the connection is lost the message is dropped: all of them are repeated by the protocol,
        and what is old by the time of the reconnect would only be in the way.

        Raises:
            ProtocolError: the payload is larger than ``max_payload``.
            BrokerError: the broker has acknowledged nothing for 30 s.
        """
        if len(payload) + len(topic) > self._max_payload:
            raise ProtocolError(
                f"a message of {len(payload)} bytes on {topic} is over the limit of {self._max_payload}: "
                "use smaller chunks"
            )
        client = self._connected_client()
        with self._outstanding:
            free = self._outstanding.wait_for(
                lambda: self._unacknowledged < MAX_OUTSTANDING or not client.is_connected(), timeout=30
            )
            if not free:
                raise BrokerError(f"the broker at {self._host}:{self._port} takes no more messages")
            if not client.is_connected():
                return
            self._unacknowledged += 1
        # Outside our lock: paho calls on_publish with a lock of its own held.
        client.publish(topic, payload, qos=1, retain=retain)

    def subscribe(self, pattern: str) -> None:
        """Subscribe, now and after every reconnect."""
        with self._lock:
            self._patterns.add(pattern)
        self._connected_client().subscribe(pattern, qos=1)

    def unsubscribe(self, pattern: str) -> None:
        """End a subscription."""
        with self._lock:
            self._patterns.discard(pattern)
        self._connected_client().unsubscribe(pattern)

    def receive(self, timeout: float) -> Event | None:
        """The next event, or None after ``timeout`` seconds."""
        try:
            return self._events.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Wait up to 5 s for what is outstanding, then disconnect without the will."""
        client, self._client = self._client, None
        if client is None:
            return
        with self._outstanding:
            self._outstanding.wait_for(lambda: not self._unacknowledged or not client.is_connected(), 5)
        client.disconnect()
        client.loop_stop()

    def _connected_client(self) -> mqtt.Client:
        if self._client is None:
            raise BrokerError("not connected to a broker: call connect() first")
        return self._client

    def _try(self, version: MQTTProtocolVersion, timeout: float) -> _Refusal | None:
        client = self._make_client(version)
        try:
            client.connect_timeout = timeout
            client.connect(self._host, self._port, KEEPALIVE)
        except (OSError, ValueError) as error:
            hint = "check its certificate" if isinstance(error, ssl.SSLError) else "is it running?"
            raise BrokerError(f"no broker at {self._host}:{self._port} ({error}); {hint}") from None
        client.loop_start()
        try:
            refusal = self._answer.get(timeout=timeout)
        except queue.Empty:
            refusal = _Refusal(f"no CONNACK within {timeout:.0f} s")
        if refusal is None:
            self._client = client
        else:
            client.disconnect()
            client.loop_stop()
        return refusal

    def _make_client(self, version: MQTTProtocolVersion) -> mqtt.Client:
        # The suffix keeps two devices that claim one id from throwing each other off the broker.
        client_id = f"{self._name}-{secrets.token_hex(4)}"
        client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=version)
        if self._credentials.username is not None:
            client.username_pw_set(self._credentials.username, self._credentials.password)
        if self._tls_context is not None:
            client.tls_set_context(self._tls_context)
        self._set_will(client)
        client.max_inflight_messages_set(20)
        # A whole fleet loses its connection at once when a broker restarts, and must not return at once.
        client.reconnect_delay_set(min_delay=1 + secrets.randbelow(3), max_delay=30 + secrets.randbelow(31))
        client.on_socket_open = _send_at_once
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        self._answer = queue.Queue()
        return client

    def _set_will(self, client: mqtt.Client) -> None:
        if self._will is not None:
            will = self._will()
            client.will_set(will.topic, will.payload, qos=1)

    # paho's network thread calls these; they only note and queue, so nothing in them can raise.

    def _on_connect(
        self, client: mqtt.Client, _data: Any, _flags: Any, code: ReasonCode, properties: Properties | None
    ) -> None:
        if code.is_failure:
            refusal = _Refusal(f"{code} (reason code {code.value})", code.value in _FINAL)
            self._answer.put(refusal)
            if client is self._client and refusal.final:
                self._events.put(Disconnected(refusal.reason, fatal=True))
                client.disconnect()
            return
        limit = getattr(properties, "MaximumPacketSize", None) if properties else None
        if limit:
            self._max_payload = min(self._max_payload, limit - 256)
        with self._lock:
            patterns = [(pattern, 1) for pattern in sorted(self._patterns)]
        if patterns:
            client.subscribe(patterns)
        self._answer.put(None)
        self._events.put(Connected())

    def _on_disconnect(
        self, client: mqtt.Client, _data: Any, _flags: Any, code: ReasonCode, _properties: Properties | None
    ) -> None:
        self._answer.put(_Refusal(f"it hung up before its CONNACK ({code})"))
        with self._outstanding:
            self._outstanding.notify_all()
        if client is self._client:
            self._set_will(client)
            self._events.put(Disconnected(str(code)))

    def _on_message(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        # What nobody takes in is dropped, as a broker would: the protocol asks for it again.
        if self._events.qsize() < MAX_WAITING:
            self._events.put(Received(message.topic, bytes(message.payload)))

    def _on_publish(
        self, _client: mqtt.Client, _data: Any, _mid: int, _code: ReasonCode, _properties: Properties
    ) -> None:
        with self._outstanding:
            self._unacknowledged -= 1
            self._outstanding.notify_all()


def _send_at_once(_client: mqtt.Client, _data: Any, connection: Any) -> None:
    # Our messages are small and each waits for an answer: Nagle's algorithm would add 40 ms to every one.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def login_of(url: str, credentials: Credentials | None) -> str | None:
    """The user name that a transport with these arguments logs in with; BrokerError as for the transport."""
    return _parse(url, credentials or Credentials())[3].username


def _parse(url: str, given: Credentials) -> tuple[str, int, bool, Credentials]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BrokerError(f"{url!r} has no valid port") from None
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname:
        raise BrokerError(f"{url!r} is not a broker's URL: write mqtt://HOST[:PORT] or mqtts://HOST[:PORT]")
    if parts.username is not None and given.username is None:
        given = Credentials(
            username=unquote(parts.username),
            password=unquote(parts.password or ""),
            ca=given.ca,
            cert=given.cert,
            key=given.key,
        )
    tls = parts.scheme == "mqtts"
    return parts.hostname, port or (8883 if tls else 1883), tls, given


def _tls_context(credentials: Credentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.ca)
        if credentials.cert is not None:
            context.load_cert_chain(credentials.cert, credentials.key)
    except (OSError, ssl.SSLError) as error:
        raise BrokerError(f"a TLS file cannot be used ({error}): check --ca, --cert and --key") from None
    return context
