"""Waiting with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(fact: Callable[[], T], seconds: float = 30.0, what: str = "") -> T:
    """The first true value of ``fact``; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := fact()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what or fact}"
        time.sleep(0.02)
    return value
