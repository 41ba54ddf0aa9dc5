"""One malformed input, watched: what it raises, how long it takes, what it allocates."""

from __future__ import annotations

import contextlib
import gc
import resource
import signal
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from hostile.decoder import Decoder

SECONDS = 1.0
"""Of the processor, for one input."""
WAITS = 20.0
"""Seconds by the clock after which it hangs."""
BYTES = 64 << 20
"""That one input may make a decoder allocate beyond its own length."""


@dataclass(frozen=True)
class Outcome:
    """What one input came to.

    Attributes:
        taken: it was not refused.
        seconds: of the processor.
        allocated: bytes, at the most.
        defect: what must not be, in one line; empty for nothing.
        where: the file and line that raised it, or the decoder's name: to tell defects apart.
    """

    taken: bool
    seconds: float
    allocated: int
    defect: str = ""
    where: str = ""


def watch(decoder: Decoder, data: bytes) -> Outcome:
    """Read ``data``; what Python allocates is counted while tracemalloc is on, the rest by its growth."""
    began, resident = time.thread_time(), _resident()
    base = _traced()
    taken, defect, where = True, "", decoder.name
    try:
        with _no_longer_than(WAITS):
            decoder.read(data)
    except decoder.refuses:
        taken = False
    except Exception as error:
        defect = f"{type(error).__name__}: {str(error)[:200]}"
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/edge_" in frame.filename or "/hostile/" in frame.filename]
        where = f"{ours[-1].filename.rsplit('/', 1)[-1]}:{ours[-1].lineno} {type(error).__name__}"
    seconds = time.thread_time() - began
    traced = tracemalloc.get_traced_memory()[1] - base if tracemalloc.is_tracing() else 0
    allocated = max(traced, _resident() - resident, 0)
    if not defect and seconds > SECONDS:
        seconds = _again(decoder, data)
    if not defect and seconds > SECONDS:
        defect = f"takes {seconds:.1f} s"
    if not defect and allocated > BYTES + len(data):
        defect = f"allocates {allocated >> 20} MB for {len(data)} bytes"
    return Outcome(taken, seconds, allocated, defect, where)


def _traced() -> int:
    if not tracemalloc.is_tracing():
        return 0
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]


def _again(decoder: Decoder, data: bytes) -> float:
    """Seconds of the processor without what the first time may have paid for: tracemalloc, which makes loops
    over small objects 20 times slower, and the collector, which goes over all that the process has."""
    traced, frames = tracemalloc.is_tracing(), tracemalloc.get_traceback_limit()
    tracemalloc.stop()
    gc.collect()
    began = time.thread_time()
    with contextlib.suppress(*decoder.refuses), _no_longer_than(WAITS):
        decoder.read(data)
    seconds = time.thread_time() - began
    if traced:
        tracemalloc.start(frames)
    return seconds


def _resident() -> int:
    """The most memory that the process has had, in bytes; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"hangs: not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    # A test may have a timer of its own.
    theirs = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *theirs)
