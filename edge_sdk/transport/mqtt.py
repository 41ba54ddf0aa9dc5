"""MQTT by paho: version 5 by preference, 3.1.1 where the broker has no 5.

Sessions are clean and everything is QoS 1: what was missed is asked for again by our own messages.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from paho.mqtt.enums import MQTTProtocolVersion

from edge_sdk.errors import BrokerError, ProtocolError
from edge_sdk.transport import tls
from edge_sdk.transport.connection import Account, Connection, RefusedConnection
from edge_sdk.transport.events import Connected, Disconnected, Event, Transport, Will
from edge_sdk.transport.failures import FINAL, failure_of
from edge_sdk.transport.inbox import Inbox
from edge_sdk.transport.outstanding import Limit, Outstanding, Retaining
from edge_sdk.transport.pauses import Pauses

logger = logging.getLogger(__name__)

MAX_PAYLOAD = 128 << 10
KEEPALIVE = 20
MAX_OUTSTANDING = 256
"""Messages that may wait for their PUBACK before ``publish`` waits too."""

# Reason codes of a CONNACK: of another version; and unavailable, busy, over its quota, asked too often.
_OTHER_VERSION = 132
_BUSY = {136, 137, 151, 159}

_FALLBACK_AFTER = 3.0
_AGAIN = 10.0
"""Seconds that an attempt to connect anew may take."""
_LAST = 5.0
_GOODBYE = 2.0


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


class MqttTransport(Transport):
    """A connection to the broker at ``url`` (``mqtt://host:1883`` or ``mqtts://host:8883``).

    Args:
        url: may carry user and password.
        name: the beginning of the client id, to be told apart in the broker's log.
        credentials: login and TLS files.
        max_payload: largest payload of a message in bytes; a smaller limit of the broker's wins.
        patience: seconds without an acknowledgement after which a connection that is full is given up.
        keepalive: seconds of silence, 1 to 65,535, after which a ping is due; after half as many more the
            broker cuts us off. Lower it where the network forgets a silent connection sooner.
        retain: False for a broker that keeps no retained messages and has no MQTT 5 to say so; one that hangs
            up on them is found out.

    Raises:
        BrokerError: the URL is not one of a broker, a TLS file cannot be used, TLS files are given for a URL
            without TLS, or ``keepalive`` is out of its range.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "edge",
        credentials: Credentials | None = None,
        max_payload: int = MAX_PAYLOAD,
        patience: float = 30.0,
        keepalive: int = KEEPALIVE,
        retain: bool = True,
    ) -> None:
        host, port, encrypted, login = _parse(url, credentials or Credentials())
        files = (login.ca, login.cert, login.key)
        if not encrypted and any(files):
            raise BrokerError("certificates are given, but mqtt:// does not use them: write mqtts://")
        if not 1 <= keepalive <= 65535:
            raise BrokerError(f"a keepalive of {keepalive} s is none: give 1 to 65535")
        self._account = Account(
            host=host,
            port=port,
            context=tls.make_context(*files) if encrypted else None,
            username=login.username,
            password=login.password,
            certified=login.cert is not None,
            keepalive=keepalive,
        )
        self._name = name
        self._own_limit = self._max_payload = max_payload
        self._patience = patience
        self._retain = self._can_retain = retain
        self._version = MQTTProtocolVersion.MQTTv5
        self._will: Callable[[], Will] | None = None
        self._inbox = Inbox()
        self._limit, self._retaining = Limit(), Retaining()
        self._lock = threading.Lock()
        self._patterns: set[str] = set()
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes: ours, or the broker's where that is smaller."""
        return self._max_payload

    @property
    def can_retain(self) -> bool:
        """Whether the broker keeps retained messages, as far as ``retain``, it, or its hanging up tells."""
        return self._can_retain

    @property
    def room(self) -> int:
        """Messages that may be published now without a wait."""
        connection = self._connection
        return MAX_OUTSTANDING if connection is None else connection.outstanding.room

    def connect(self, will: Callable[[], Will] | None, *, timeout: float) -> None:
        """Connect with MQTT 5, then with 3.1.1 if the broker refuses 5 or hangs up before its CONNACK.

        Raises:
            BrokerError: unreachable within ``timeout`` seconds, or refused; says which.
        """
        self.close()
        self._will, self._inbox = will, Inbox()
        self._limit, self._retaining = Limit(), Retaining()
        over = threading.Event()
        connection = self._open_first(time.monotonic() + timeout)
        self._over = over
        self._attach(connection, over)
        self._start(connection, over)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue a message at QoS 1; waits while :data:`MAX_OUTSTANDING` are not acknowledged.

        While the connection is lost the message is dropped: all of them are repeated by the protocol,
        and what is old by the time of the reconnect would only be in the way. So it is where the broker
        acknowledges nothing: that connection is given up and made anew.

        Raises:
            ProtocolError: the payload is larger than ``max_payload``.
            BrokerError: not connected yet.
        """
        self._check_begun()
        if len(payload) + len(topic) > self._max_payload:
            raise ProtocolError(
                f"a message of {len(payload)} bytes on {topic} is over the limit of {self._max_payload}: "
                "use smaller chunks"
            )
        connection = self._connection
        if connection is not None and (self._can_retain or not retain):
            connection.publish(topic, payload, retain=retain, patience=self._patience)

    def subscribe(self, pattern: str) -> None:
        """Subscribe, now and after every reconnect."""
        self._check_begun()
        with self._lock:
            self._patterns.add(pattern)
            if self._connection is not None:
                self._connection.subscribe([pattern])

    def unsubscribe(self, pattern: str) -> None:
        """End a subscription."""
        self._check_begun()
        with self._lock:
            self._patterns.discard(pattern)
            if self._connection is not None:
                self._connection.unsubscribe(pattern)

    def receive(self, timeout: float) -> Event | None:
        """The next event, or None after ``timeout`` seconds."""
        event = self._inbox.take(timeout)
        thread, over = self._thread, self._over
        if event is None and thread is not None and not thread.is_alive() and not over.is_set():
            # Whatever it died of must not leave us waiting for ever.
            logger.error("the network thread has died: it is started anew")
            self._lose(self._connection)
            self._inbox.put(Disconnected("the network thread has died"))
            self._start(None, over)
        return event

    def close(self) -> None:
        """Wait up to 5 s for what is outstanding, then disconnect without the will."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._over.set()
        with self._lock:
            connection = self._connection
        if connection is not None:
            connection.outstanding.drain(_LAST)
            connection.say_goodbye()
            thread.join(_GOODBYE)
            connection.end("closed by this program")
        # A thread that looks for the host's address cannot be interrupted; it ends by itself.
        thread.join(_GOODBYE)
        self._lose(connection)
        self._patterns.clear()

    def _check_begun(self) -> None:
        if self._thread is None:
            raise BrokerError("not connected to a broker: call connect() first")

    # One connection.

    def _open(self, version: MQTTProtocolVersion, deadline: float, patience: float) -> Connection:
        connection = Connection(
            self._account,
            version=version,
            # The suffix keeps two devices that claim one id from throwing each other off the broker.
            client_id=f"{self._name}-{secrets.token_hex(4)}",
            will=self._will() if self._will is not None else None,
            max_payload=self._own_limit,
            outstanding=Outstanding(MAX_OUTSTANDING),
            on_message=self._inbox.put,
        )
        limits = connection.open(deadline, patience)
        largest = getattr(limits, "MaximumPacketSize", None)
        self._max_payload = min(self._own_limit, largest - 256) if largest else self._own_limit
        self._can_retain = self._retain and bool(getattr(limits, "RetainAvailable", True))
        self._version = version
        return connection

    def _open_first(self, deadline: float) -> Connection:
        try:
            return self._open(MQTTProtocolVersion.MQTTv5, deadline, _FALLBACK_AFTER)
        except (OSError, ValueError, RefusedConnection) as error:
            if not isinstance(error, RefusedConnection) or error.code in FINAL:
                raise BrokerError(failure_of(error, self._account, deadline).sentence) from None
        try:
            return self._open(MQTTProtocolVersion.MQTTv311, deadline, math.inf)
        except (OSError, ValueError, RefusedConnection) as error:
            raise BrokerError(failure_of(error, self._account, deadline).sentence) from None

    def _attach(self, connection: Connection, over: threading.Event) -> None:
        with self._lock:
            if over.is_set():
                connection.end("closed by this program")
                return
            self._connection = connection
            connection.subscribe(self._patterns)
        self._inbox.put(Connected())

    def _suspected(self, connection: Connection) -> str:
        """What the broker seems to have hung up on, time after time; empty if nothing is suspected."""
        what, outstanding, hung_up = [], connection.outstanding, connection.hung_up
        if self._retaining.is_refused(outstanding, hung_up=hung_up):
            self._retain = False
            what.append("to keep no retained messages: it is sent none from now on")
        if (size := self._limit.ended(outstanding, hung_up=hung_up)) is not None:
            what.append(f"to take less than {size} bytes: set chunk_bytes lower")
        return f"the broker seems {'; or '.join(what)}" if what else ""

    def _lose(self, connection: Connection | None) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None

    # The network thread: one connection after the other.

    def _start(self, connection: Connection | None, over: threading.Event) -> None:
        self._thread = threading.Thread(
            target=self._keep, args=(connection, self._inbox, over), name="edge-mqtt", daemon=True
        )
        self._thread.start()

    def _keep(self, connection: Connection | None, inbox: Inbox, over: threading.Event) -> None:
        """Carry a connection to its end and make it anew, until this transport is closed."""
        pauses, told = Pauses(), ""
        while connection is not None or not over.is_set():
            if connection is not None:
                told = connection.run()
                self._lose(connection)
                if over.is_set():
                    return
                told = self._suspected(connection) or told
                inbox.put(Disconnected(told))
                pauses.held(connection.held)
                connection = None
            if over.wait(pauses.next()):
                return
            try:
                connection = self._open(self._version, time.monotonic() + _AGAIN, math.inf)
            except Exception as error:
                code = error.code if isinstance(error, RefusedConnection) else 0
                if code in _BUSY:
                    pauses.busy()
                elif code == _OTHER_VERSION:
                    self._version = MQTTProtocolVersion.MQTTv311
                event = failure_of(error, self._account, time.monotonic() + _AGAIN).event
                if event.fatal:
                    over.set()
                if event.reason != told:
                    told = event.reason
                    inbox.put(event)
                continue
            self._attach(connection, over)


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
    encrypted = parts.scheme == "mqtts"
    return parts.hostname, port or (8883 if encrypted else 1883), encrypted, given
