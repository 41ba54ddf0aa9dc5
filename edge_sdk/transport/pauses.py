"""How long to wait before the next attempt to connect."""

from __future__ import annotations

import random

FIRST = 2.0
"""Seconds: the longest pause after a connection that has held."""
LONGEST = 60.0
"""Seconds that no pause exceeds."""
STEADY = 10.0
"""Seconds after which a connection has held."""
_BUSY_FROM = 4


class Pauses:
    """Exponential back-off with full jitter.

    A fleet loses its connections at once when a broker restarts, and must not return at once: a pause is
    uniform between 0 and a bound that doubles with every failure.
    """

    def __init__(self) -> None:
        self._failures = 0

    @property
    def bound(self) -> float:
        """Seconds that the next pause does not exceed."""
        return min(FIRST * 2.0**self._failures, LONGEST)

    def next(self) -> float:
        """Seconds to wait now; the next bound is twice as high."""
        pause = random.uniform(0.0, self.bound)
        self._failures = min(self._failures + 1, 10)
        return pause

    def held(self, seconds: float) -> None:
        """A connection has ended after ``seconds``: one that ends at once is no better than none."""
        if seconds >= STEADY:
            self._failures = 0

    def busy(self) -> None:
        """The broker has said that it has too much to do."""
        self._failures = max(self._failures, _BUSY_FROM)
