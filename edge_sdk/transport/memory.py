"""A broker in this process, for tests and for fleets that are simulated in one process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from paho.mqtt.client import topic_matches_sub

from edge_sdk.errors import BrokerError, ProtocolError
from edge_sdk.transport.events import Connected, Event, Received, Transport, Will


class MemoryBroker:
    """Delivers between the transports that it made, with retained messages and wills.

    Args:
        max_payload: largest payload of one message in bytes.
        can_retain: False for a broker that keeps no retained messages.
    """

    def __init__(self, max_payload: int = 128 << 10, *, can_retain: bool = True) -> None:
        self.max_payload = max_payload
        self.can_retain = can_retain
        self._lock = threading.RLock()
        self._retained: dict[str, bytes] = {}
        self._transports: list[MemoryTransport] = []

    def transport(self) -> MemoryTransport:
        """A new transport, not yet connected."""
        return MemoryTransport(self)

    def route(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Deliver a message to all who subscribe to its topic."""
        if retain and not self.can_retain:
            return
        with self._lock:
            if retain and payload:
                self._retained[topic] = payload
            elif retain:
                self._retained.pop(topic, None)
            for transport in self._transports:
                transport.offer(topic, payload)

    def attach(self, transport: MemoryTransport) -> None:
        """Begin to deliver to ``transport``."""
        with self._lock:
            self._transports.append(transport)

    def detach(self, transport: MemoryTransport, will: Will | None) -> None:
        """End delivery to ``transport``; publish ``will`` if there is one."""
        with self._lock:
            if transport in self._transports:
                self._transports.remove(transport)
        if will is not None:
            self.route(will.topic, will.payload)

    def replay_retained(self, transport: MemoryTransport, pattern: str) -> None:
        """Deliver the retained messages that match a new subscription."""
        with self._lock:
            for topic, payload in list(self._retained.items()):
                if topic_matches_sub(pattern, topic):
                    transport.offer(topic, payload, retained=True)


class MemoryTransport(Transport):
    """One connection to a :class:`MemoryBroker`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self._events: queue.Queue[Event] = queue.Queue()
        self._patterns: set[str] = set()
        self._will: Will | None = None

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes that one message may have here."""
        return self._broker.max_payload

    @property
    def can_retain(self) -> bool:
        """Whether the broker keeps retained messages."""
        return self._broker.can_retain

    def connect(self, will: Callable[[], Will] | None, *, timeout: float) -> None:  # noqa: ARG002 - always at once
        """Connect at once."""
        self._will = will() if will else None
        self._broker.attach(self)
        self._events.put(Connected())

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Deliver a message now."""
        if len(payload) > self.max_payload:
            raise ProtocolError(f"a message of {len(payload)} bytes is over the limit of {self.max_payload}")
        self._broker.route(topic, payload, retain=retain)

    def subscribe(self, pattern: str) -> None:
        """Subscribe and get what is retained."""
        self._patterns.add(pattern)
        self._broker.replay_retained(self, pattern)

    def unsubscribe(self, pattern: str) -> None:
        """End a subscription."""
        self._patterns.discard(pattern)

    def offer(self, topic: str, payload: bytes, *, retained: bool = False) -> None:
        """Queue a message if a subscription matches its topic."""
        if any(topic_matches_sub(pattern, topic) for pattern in tuple(self._patterns)):
            self._events.put(Received(topic, payload, retained))

    def receive(self, timeout: float) -> Event | None:
        """The next event, or None after ``timeout`` seconds."""
        try:
            return self._events.get(timeout=max(timeout, 0.0))
        except queue.Empty:
            return None

    def lose(self) -> None:
        """Break the connection as a power cut does: the will is published."""
        if self._will is None:
            raise BrokerError("this transport has no will to publish")
        self._broker.detach(self, self._will)

    def close(self) -> None:
        """Disconnect without the will."""
        self._broker.detach(self, None)
