"""One connection's taking part: the event loop between the server's messages and the worker thread."""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from edge_sdk._version import __version__
from edge_sdk.errors import (
    BrokerError,
    BundleError,
    DataError,
    EdgeError,
    RefusedError,
    RuntimeUnavailableError,
)
from edge_sdk.examples import Cancelled
from edge_sdk.exchange import Exchange
from edge_sdk.link import Incoming, Link
from edge_sdk.protocol import Chunk
from edge_sdk.protocol.messages import (
    Cancel,
    Declined,
    Finished,
    Grant,
    Here,
    Join,
    Offer,
    Receipt,
    Refused,
    Taken,
    Task,
    Welcome,
    Who,
    key_of,
)
from edge_sdk.transport import Connected, Disconnected
from edge_sdk.work import Worker

logger = logging.getLogger(__name__)

JOIN_EVERY = 3.0
TICK = 0.1
HAND_IN = 60.0
"""Seconds without an answer after which an update of an earlier visit is kept for a later one."""
# The device's own set-up is wrong, so that another round would go wrong in the same way.
_FATAL = (DataError, BundleError, RuntimeUnavailableError)


@dataclass(slots=True)
class _Job:
    """What the worker thread is doing, for which message, and the wish that it stops."""

    cause: Task | Offer | Finished
    future: Future[Receipt | None]
    cancel: threading.Event


@dataclass(slots=True, kw_only=True)
class Session:
    """Takes part over ``link`` until the run ends or the caller has enough.

    Args:
        lease: seconds that the device offers at a check-in; None for a device that stays.
        may_train: asked before a task is taken.
        join_timeout: seconds to wait for the first welcome.
    """

    link: Link
    worker: Worker
    may_train: Callable[[], bool]
    join_timeout: float
    lease: float | None = None
    accepted: int = field(default=0, init=False)
    come_back: int | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)
    _exchange: Exchange = field(init=False)
    _pool: ThreadPoolExecutor = field(init=False)
    _welcome: Welcome | None = field(default=None, init=False)
    _joined: bool = field(default=False, init=False)
    _next_join: float = field(default=0.0, init=False)
    _next_heartbeat: float = field(default=0.0, init=False)
    _began: float = field(init=False)
    _boot: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _jobs: list[_Job] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._exchange = Exchange(self.link)
        self._began = time.monotonic()

    def serve(self, *, rounds: int | None, stop: threading.Event) -> None:
        """Run the loop to its end; the link is open. Raises what :meth:`EdgeClient.run` documents."""
        self._pool = ThreadPoolExecutor(1, "edge-train")
        try:
            while not stop.is_set() and not self._enough(rounds):
                self._keep_in_touch(time.monotonic())
                event = self.link.receive(TICK)
                if event is not None:
                    self._on_event(event)
                self._settle()
        finally:
            for job in self._jobs:
                job.cancel.set()
            self._pool.shutdown(wait=True)

    def _enough(self, rounds: int | None) -> bool:
        if self.lease is not None and time.monotonic() - self._began > self.lease:
            if self._welcome is None:
                raise BrokerError(self._unanswered(self.lease))
            return True
        if rounds is not None and self.accepted >= rounds:
            return True
        return not self._jobs and (self.finished or (self.lease is not None and self.come_back is not None))

    @property
    def _job(self) -> _Job | None:
        """The job that counts; those before it were cancelled and are ending."""
        return self._jobs[-1] if self._jobs else None

    def _keep_in_touch(self, now: float) -> None:
        if not self._joined and now >= self._next_join:
            if self._welcome is None and now - self._began > self.join_timeout:
                raise BrokerError(self._unanswered(self.join_timeout))
            self._next_join = now + JOIN_EVERY
            left = None if self.lease is None else max(int(self.lease - (now - self._began)), 0)
            self.link.send(
                Join(
                    sdk=__version__,
                    install=self.worker.workspace.install,
                    boot=self._boot,
                    nonce=self.link.nonce,
                    examples=self.worker.examples,
                    lease=left,
                )
            )
        elif self._joined and now >= self._next_heartbeat and self._welcome is not None:
            self._next_heartbeat = now + self._welcome.heartbeat
            self.link.send(Here(nonce=self.link.nonce, examples=self.worker.examples))

    def _unanswered(self, seconds: float) -> str:
        device = self.link.device
        return (
            f"no server has answered device {device} within {seconds:.0f} s: is 'edge-sdk serve' running for "
            f"this fleet, and does the broker's ACL let this device write …/up/{device}/+ and read "
            f"…/down/{device}/+? With a login or a certificate the id must be its name"
        )

    def _on_event(self, event: Incoming) -> None:
        match event:
            case Chunk():
                self._exchange.feed_chunk(event)
            case Grant() | Receipt():
                self._exchange.feed_answer(event)
            case Task() if event.nonce == self.link.nonce:
                self._on_task(event)
            case Welcome() if event.nonce == self.link.nonce:
                self._on_welcome(event)
            case Cancel() if self._job is not None and _same(self._job.cause, event):
                logger.info("round %d is over for this device: %s", event.round, event.reason)
                self._job.cancel.set()
            case Refused() if event.nonce == self.link.nonce:
                raise RefusedError(f"the server refuses device {self.link.device}: {event.reason}")
            case Who():
                self._joined = False
                self._next_join = time.monotonic() + random.uniform(0, event.jitter)
            case Connected():
                self._joined, self._next_join = False, 0.0
            case Disconnected() if event.fatal:
                raise BrokerError(f"the broker refuses this device: {event.reason}")
            case Disconnected():
                logger.warning("connection lost (%s); trying again", event.reason)
            case Finished() if self._welcome is not None and event.run == self._welcome.run:
                self.finished = True
                self._start(event)

    def _on_welcome(self, welcome: Welcome) -> None:
        if not self._joined:
            logger.info("welcomed to run %s as %s", welcome.run[:8], self.link.device)
        self._joined, self._welcome, self.come_back = True, welcome, welcome.come_back
        self._next_heartbeat = time.monotonic() + welcome.heartbeat
        pending = self.worker.workspace.pending
        if pending is not None and self._job is None:
            if pending.run == welcome.run:
                self._start(pending)
            else:
                self.worker.workspace.clear_pending(accepted=False)

    def _on_task(self, task: Task) -> None:
        if self._job is not None and _same(self._job.cause, task):
            # The server has not heard that it is being done.
            self.link.send(Taken(**key_of(task), examples=None))
            return
        self.come_back = None
        if not self.may_train():
            self.link.send(_declined(task, "the app does not allow training now"))
            return
        self._start(task)

    def _start(self, cause: Task | Offer | Finished) -> None:
        """Begin a job; one that is still running is cancelled first, and ends before the new one begins."""
        for job in self._jobs:
            job.cancel.set()
        cancel = threading.Event()
        self._jobs.append(_Job(cause, self._pool.submit(self._do, cause, cancel.is_set), cancel))

    def _do(self, cause: Task | Offer | Finished, cancelled: Callable[[], bool]) -> Receipt | None:
        if isinstance(cause, Task):
            return self.worker.perform(cause, self.link, self._exchange, cancelled)
        if isinstance(cause, Offer):
            return self.worker.settle(cause, self._exchange, cancelled, timeout=HAND_IN)
        assert self._welcome is not None
        self.worker.load(self._welcome.bundle, cause.model, self._exchange, cancelled)
        return None

    def _settle(self) -> None:
        """Look at the jobs that have ended; the receipt of one that a new task has overtaken counts too."""
        while self._jobs and self._jobs[0].future.done():
            self._conclude(self._jobs.pop(0))

    def _conclude(self, job: _Job) -> None:
        try:
            receipt = job.future.result()
        except Cancelled:
            return
        except Exception as error:
            # What the app's own code says may tell of its files and data.
            reason = str(error) if isinstance(error, EdgeError) else f"{type(error).__name__} on this device"
            if isinstance(job.cause, Task):
                self.link.send(_declined(job.cause, reason))
            if isinstance(error, _FATAL) or not isinstance(error, EdgeError):
                raise
            logger.warning("this device could not do its task: %s", reason)
            return
        if receipt is not None and receipt.accepted:
            self.accepted += 1
        elif receipt is not None:
            logger.warning("the server refused this device's update: %s", receipt.reason)


def _same(cause: Task | Offer | Finished, other: Task | Cancel) -> bool:
    return not isinstance(cause, Finished) and cause.key == other.key


def _declined(task: Task, reason: str) -> Declined:
    return Declined(**key_of(task), reason=reason[:500])
