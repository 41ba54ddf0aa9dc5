"""The seam between the SDK and a broker: what a transport does, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Received:
    """A message has arrived.

    ``retained`` says that the broker had kept it from before we subscribed.
    """

    topic: str
    payload: bytes
    retained: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection is there (again), and every subscription has been made anew."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is lost; the transport tries again by itself, with back-off and jitter.

    ``fatal`` says that it does not: ``reason`` is the broker's refusal.
    """

    reason: str
    fatal: bool = False


Event: TypeAlias = Received | Connected | Disconnected


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes when the connection is lost without a goodbye."""

    topic: str
    payload: bytes


class Transport(Protocol):
    """A connection to a broker. Messages may be lost, doubled and reordered: the protocol copes.

    ``receive`` is called by one thread; ``publish``, ``subscribe`` and ``unsubscribe`` by any.
    """

    @property
    def max_payload(self) -> int:
        """Largest payload in bytes that one message may have here."""

    @property
    def can_retain(self) -> bool:
        """Whether the broker keeps retained messages; where it does not, none is sent."""
        return True

    @property
    def room(self) -> int:
        """Messages that may be published now without a wait."""
        return 256

    def connect(self, will: Callable[[], Will] | None, *, timeout: float) -> None:
        """Connect; BrokerError after ``timeout`` seconds or a refusal.

        ``will`` is asked anew for every attempt, so that an old will is told from a new connection. After
        ``close`` it may be called again, and begins without the messages and subscriptions of before.
        """

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Queue a message; waits (bounded) while too much is outstanding.

        It is dropped while there is no connection, and where the broker acknowledges nothing.

        Raises:
            ProtocolError: the payload is larger than ``max_payload``.
            BrokerError: :meth:`connect` has not been called.
        """

    def subscribe(self, pattern: str) -> None:
        """Subscribe, now and after every reconnect."""

    def unsubscribe(self, pattern: str) -> None:
        """End a subscription."""

    def receive(self, timeout: float) -> Event | None:
        """The next event, or None after ``timeout`` seconds."""

    def close(self) -> None:
        """Send what is queued (bounded), disconnect without the will, end all threads."""
