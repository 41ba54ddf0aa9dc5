"""How far an export has come: minutes, for a deep network and ExecuTorch."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

progress = logging.getLogger("edge_export")
"""Told of each stage as it begins; an application may listen."""


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Print the stages on the standard error stream, and after how many seconds each began."""
    handler = _Elapsed()
    level, propagates = progress.level, progress.propagate
    progress.addHandler(handler)
    progress.setLevel(logging.INFO)
    progress.propagate = False  # ExecuTorch gives the root a handler of its own
    try:
        yield
    finally:
        progress.setLevel(level)
        progress.propagate = propagates
        progress.removeHandler(handler)


class _Elapsed(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self._start = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        print(f"{time.monotonic() - self._start:5.0f} s  {record.getMessage()}", file=sys.stderr, flush=True)
