"""What has arrived and waits to be taken: bounded in messages and in bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from edge_sdk.transport.events import Event, Received

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Messages that may wait before further ones are dropped."""
MAX_WAITING_BYTES = 64 << 20
"""Bytes that may wait before further messages are dropped."""


class Inbox:
    """Events from the network thread to the one that takes them.

    What nobody takes in is dropped, as a broker would: the protocol asks for it again.

    Args:
        messages: that may wait.
        size: bytes of payloads and topics that may wait.
    """

    def __init__(self, messages: int = MAX_WAITING, size: int = MAX_WAITING_BYTES) -> None:
        self._messages, self._most_bytes = messages, size
        self._events: deque[Event] = deque()
        self._arrived = threading.Condition()
        self._bytes = 0
        self._dropping = False

    def put(self, event: Event) -> None:
        """Add an event; a message for which there is no room is dropped."""
        with self._arrived:
            if isinstance(event, Received):
                size = _size(event)
                if len(self._events) >= self._messages or self._bytes + size > self._most_bytes:
                    if not self._dropping:
                        logger.warning("messages come faster than they are taken: some are dropped")
                    self._dropping = True
                    return
                self._bytes += size
            self._events.append(event)
            self._arrived.notify()

    def take(self, timeout: float) -> Event | None:
        """The oldest event, or None after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._arrived:
            while not self._events:
                left = deadline - time.monotonic()
                if left <= 0 or not self._arrived.wait(left):
                    break
            if not self._events:
                return None
            event = self._events.popleft()
            if isinstance(event, Received):
                self._bytes -= _size(event)
            self._dropping = self._dropping and bool(self._events)
            return event


def _size(event: Received) -> int:
    return len(event.payload) + len(event.topic)
