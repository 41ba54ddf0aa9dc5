"""What a connection has published and the broker has not acknowledged, and what that tells of its limits."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

LARGE = 4 << 10
"""Bytes from which the size of a message may be why a broker hangs up."""
SUSPECT = 3
"""Connections in a row that end on a large message before the broker's limit is suspected."""
_AT_ONCE = 1.0


class StalledError(Exception):
    """The broker acknowledges nothing."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message as it was sent: bytes of topic and payload, and the monotonic second."""

    topic: str
    size: int
    at: float
    retain: bool


class Outstanding:
    """The unacknowledged messages of one connection, at most ``most`` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._messages: dict[int, Message] = {}
        self._numbers: dict[int, int] = {}
        # A PUBACK may come before its publisher has noted what was sent.
        self._early: set[int] = set()
        self._next = 0
        self._last = time.monotonic()
        self._ended = False
        self.largest_taken = 0
        self.retained_taken = False

    @property
    def room(self) -> int:
        """Messages that may be published now without a wait."""
        return max(self._most - len(self._messages), 0)

    def bound(self, most: int) -> None:
        """Let fewer be outstanding; called before the first."""
        self._most = most

    def reserve(self, topic: str, size: int, patience: float, *, retain: bool) -> int | None:
        """Wait for a place for a message; its number, or None if the connection has ended.

        Raises:
            StalledError: the broker has acknowledged nothing for ``patience`` seconds.
        """
        with self._changed:
            begun = time.monotonic()
            while len(self._messages) >= self._most and not self._ended:
                left = max(self._last, begun) + patience - time.monotonic()
                if left <= 0:
                    raise StalledError
                self._changed.wait(left)
            if self._ended:
                return None
            self._next += 1
            self._messages[self._next] = Message(topic, size, time.monotonic(), retain)
            return self._next

    def give_up(self, number: int) -> None:
        """Return a place in which nothing was sent."""
        with self._changed:
            self._messages.pop(number)
            self._changed.notify()

    def sent(self, number: int, mid: int) -> None:
        """The message has been handed over, as ``mid``."""
        with self._changed:
            if mid not in self._early:
                self._numbers[mid] = number
                return
            self._early.discard(mid)
            self._messages.pop(number)
            self._changed.notify()

    def acknowledged(self, mid: int, *, taken: bool) -> str:
        """A PUBACK has come; returns the topic, empty if it is not known yet.

        Args:
            taken: the broker has not refused the message.
        """
        with self._changed:
            self._last = time.monotonic()
            if mid not in self._numbers:
                self._early.add(mid)
                return ""
            message = self._messages.pop(self._numbers.pop(mid))
            self._changed.notify()
            if taken:
                self.largest_taken = max(self.largest_taken, message.size)
                self.retained_taken |= message.retain
            return message.topic

    def end(self) -> None:
        """The connection has ended: nobody waits any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def drain(self, timeout: float) -> None:
        """Wait until all is acknowledged or the connection has ended, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._messages or self._ended, timeout)

    def unacknowledged(self) -> list[Message]:
        """What was published and not acknowledged, the oldest first."""
        with self._changed:
            return list(self._messages.values())


class Limit:
    """Guesses the largest message of a broker that hangs up on larger ones, as MQTT 3.1.1 has it."""

    def __init__(self) -> None:
        self._largest_taken = 0
        self._in_a_row = 0
        self._least = 0

    def ended(self, outstanding: Outstanding, *, hung_up: bool) -> int | None:
        """Learn from a connection that has ended; bytes that the broker seems not to take, or None.

        Args:
            hung_up: the broker closed it, or the network did.
        """
        now = time.monotonic()
        self._largest_taken = max(self._largest_taken, outstanding.largest_taken)
        least = max(self._largest_taken + 1, LARGE)
        large = [m for m in outstanding.unacknowledged() if m.size >= least]
        if not hung_up or not large or now - large[-1].at > _AT_ONCE:
            self._in_a_row = 0
            return None
        smallest = min(m.size for m in large)
        self._least = min(self._least, smallest) if self._in_a_row else smallest
        self._in_a_row += 1
        return self._least if self._in_a_row >= SUSPECT else None


class Retaining:
    """Guesses whether a broker hangs up on retained messages, as one that keeps none does in MQTT 3.1.1."""

    def __init__(self) -> None:
        self._taken = False
        self._in_a_row = 0

    def is_refused(self, outstanding: Outstanding, *, hung_up: bool) -> bool:
        """Learn from a connection that has ended; whether none should be sent from now on.

        Args:
            hung_up: the broker closed it, or the network did.
        """
        self._taken |= outstanding.retained_taken
        suspect = hung_up and any(message.retain for message in outstanding.unacknowledged())
        self._in_a_row = self._in_a_row + 1 if suspect and not self._taken else 0
        return self._in_a_row >= SUSPECT
