"""The devices of one fleet as a run sees them: who is there, and the work that is out with them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from edge_sdk.errors import ProtocolError, RunError, TensorError
from edge_sdk.protocol import Chunk, Topics
from edge_sdk.protocol.messages import (
    PROTOCOL,
    Cancel,
    Declined,
    Finished,
    FromDevice,
    Grant,
    Here,
    Join,
    Leave,
    Offer,
    Ref,
    Refused,
    Report,
    Taken,
    Task,
    Welcome,
    Who,
)
from edge_sdk.transport import Connected, Disconnected, Transport
from edge_server.admission import Admission
from edge_server.assignment import Assignment
from edge_server.call import Call
from edge_server.cohort import Standing
from edge_server.desk import Desk
from edge_server.publication import Publication
from edge_server.registry import Registry
from edge_server.rounds import Assessment
from edge_server.rows import RunRow
from edge_server.store import Store

logger = logging.getLogger(__name__)

JITTER = 2
"""Seconds over which devices spread their answers to ``who``."""
JOINS = 200
"""Most joins a second that ``who`` asks for."""
WARN_EVERY = 10.0
"""Seconds from one word to another server to the next."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Hears what devices say and gives them work, one assignment at a time.

    Args:
        run: whose id, fleet and settings count.
        on_status: called with a sentence whenever a device is lost, declines, or has its result refused.
        on_join: called with the id of every device that is welcomed.
    """

    transport: Transport
    store: Store
    run: RunRow
    on_status: Callable[[str], None]
    on_join: Callable[[str], None]
    publication: Publication = field(init=False)
    registry: Registry = field(default_factory=Registry, init=False)
    bundle: Ref = field(init=False)
    model: Ref = field(init=False)
    finished: bool = field(default=False, init=False)
    work: Assignment | None = field(default=None, init=False)
    _call: Call | None = field(default=None, init=False)
    _desk: Desk = field(init=False)
    _admission: Admission = field(init=False)
    _token: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _opened_at: float = field(default=0.0, init=False)
    _warned: tuple[str, float] = field(default=("", 0.0), init=False)

    def __post_init__(self) -> None:
        topics = Topics(self.run.fleet)
        self._desk = Desk(self.transport, topics)
        self.publication = Publication(
            self.transport, topics, chunk=self.run.config.chunk_bytes, known=self.registry.is_present
        )
        self._admission = Admission(desk=self._desk, store=self.store, on_refused=self.on_status)

    def open(self, *, timeout: float) -> None:
        """Connect; BrokerError if that fails within ``timeout`` seconds."""
        self._desk.open(timeout=timeout)
        self._opened_at = time.monotonic()

    # The work that is out.

    def ask(
        self,
        work: Assignment,
        now: float,
        *,
        on_called: Callable[[], None],
        kept_until: float = 0.0,
        going_on: bool = False,
    ) -> None:
        """Put the cohort of ``work`` to work.

        Args:
            going_on: devices that are at work for what was out before go on, and their results count here.
            on_called: called when further devices are asked.
            kept_until: until then the places of lost devices are kept for them.
        """
        config = self.run.config

        def make_task(device: str, nonce: str, left: float) -> Task:
            return work.task(device, nonce, bundle=self.bundle, model=self.model, left=left)

        self.work, earlier = work, self._call
        self._admission.open(work)
        self._call = Call(
            cohort=work.cohort,
            deadline=now + config.deadline * work.turns,
            turn=config.deadline,
            rolling=work.rolling,
            registry=self.registry,
            desk=self._desk,
            make_task=make_task,
            on_called=on_called,
            grace=config.grace,
            turn_of=lambda device: (work.round_of(device), work.hop_of(device)),
            kept_until=kept_until,
        )
        if going_on and earlier is not None:
            self._call.carry_over(earlier)
        else:
            self._call.ask(work.cohort.pending, now)

    def collected(self, now: float) -> bool:
        """Keep the cohort at work; True when there is nothing more to wait for."""
        self._admission.tick(now)
        return self._call is None or self._call.collected(now)

    def call_off(self, reason: str) -> None:
        """No further result is taken; devices that are still at work are told so."""
        if self.work is not None:
            for device in [*self.work.cohort.pending, *self.work.cohort.lost]:
                self._desk.tell(device, cancel_of(self.work, device, reason))
            self.work.close()
        self._admission.close()
        self.work = self._call = None

    def tick(self, now: float) -> None:
        """Note who has gone, and who has had his turn for too long; send what was asked for."""
        self.publication.tick(now)
        overdue = self._call.overdue(now) if self._call is not None else []
        for device in [*self.registry.expire(now), *overdue]:
            self._on_gone(device, now)
        if self.work is not None and self._call is not None:
            for device in self._call.late(now):
                late = cancel_of(self.work, device, "its turn is over")
                self.on_status(f"device {device} is skipped in round {self.work.key.round}")
                self._admission.forget(device)
                self.work.cohort.drop(device)
                self._desk.tell(device, late)

    def present(self, now: float) -> list[str]:
        """The devices that are there, sorted."""
        return self.registry.present(now)

    def say_goodbye(self) -> None:
        """Tell all, and all who still come, that the run has ended."""
        self.finished = True
        self._desk.tell_all(Finished(run=self.run.id, model=self.model))

    # What arrives.

    def receive(self, timeout: float) -> bool:
        """Take one event in; False if there was none.

        Raises:
            RunError: the broker refuses the server, or another server was here first.
        """
        event = self._desk.receive(timeout)
        if isinstance(event, Connected):
            # A broker that has restarted has lost what it retained, and devices may have come meanwhile.
            self.publication.send_all()
            self._desk.tell_all(self._who(time.monotonic()))
        elif isinstance(event, Who):
            self._on_server(event, time.monotonic())
        elif isinstance(event, Disconnected):
            if event.fatal:
                raise RunError(f"the broker refuses the server: {event.reason}")
            self.on_status(f"the connection to the broker is lost ({event.reason}); trying again")
        elif event is not None:
            device, content = event
            now = time.monotonic()
            try:
                if isinstance(content, Chunk):
                    self._admission.chunk(device, content, now)
                else:
                    self._on_message(device, content, now)
            except (ProtocolError, TensorError) as error:
                logger.warning("dropped what %s sent: %s", device, error)
        return event is not None

    def _on_server(self, who: Who, now: float) -> None:
        """Of two servers on one fleet the younger gives way: each would call off the other's work."""
        if who.server == self._token:
            return
        mine = self._who(now)
        if (who.age, who.server) > (mine.age, mine.server):
            raise RunError(
                f"another server serves fleet {self.run.fleet} on this broker: stop it, or give --fleet"
            )
        # It hears this and gives way; devices need not join again for it.
        rival, since = self._warned
        if rival != who.server or now - since > WARN_EVERY:
            self._warned = (who.server, now)
            self._desk.tell_all(mine)

    def _who(self, now: float) -> Who:
        # A large fleet's joins must not overflow the broker's queue.
        jitter = max(JITTER, len(self.registry) // JOINS)
        return Who(jitter=jitter, server=self._token, age=int(now - self._opened_at))

    def _on_message(self, device: str, message: FromDevice, now: float) -> None:
        work = self.work
        match message:
            case Join():
                self._on_join(device, message, now)
            case Here():
                if not self.registry.here(device, message.nonce, message.examples, now):
                    self._desk.tell(device, msgspec.structs.replace(self._who(now), jitter=0))
            case Leave():
                if self.registry.leave(device, message.nonce, now):
                    self._on_gone(device, now)
            case Grant():
                if self._call is not None and work is not None and work.lacks(device, message.blob):
                    self._call.ask([device], now)
                self.publication.serve(device, message)
            case Offer():
                self._admission.offer(device, message)
            case Taken() if work is not None and work.is_keyed(device, message):
                work.cohort.take(device)
                if message.examples is not None and work.cohort.standing(device) == Standing.TAKEN:
                    # Durable: after a restart the device does not say it again.
                    self.store.declare(device, message)
            case Declined() if work is not None and work.is_keyed(device, message):
                self._admission.forget(device)
                if work.cohort.drop(device):
                    self.on_status(f"device {device} declines round {message.round}: {message.reason}")
            case Report():
                if isinstance(work, Assessment) and work.is_keyed(device, message):
                    work.report(device, message)
                self._admission.acknowledge(device, message, None)

    def _on_join(self, device: str, join: Join, now: float) -> None:
        if join.protocol != PROTOCOL:
            reason = f"the server speaks protocol {PROTOCOL}, the device {join.protocol}: update edge-sdk-fl"
            self._desk.tell(device, Refused(nonce=join.nonce, code="protocol", reason=reason))
            return
        if refusal := self.registry.join(device, join, now):
            self._desk.tell(device, Refused(nonce=join.nonce, code="id-in-use", reason=refusal))
            return
        self.on_join(device)
        call, come_back = self._call, None
        at_work = call is not None and device in call.cohort.pending
        if call is not None and not at_work:
            if join.examples:
                call.cohort.volunteer(device)
            if join.lease is not None and not call.cohort.has_place_for(device):
                come_back = max(int(call.deadline - now), 1)
        welcome = Welcome(
            nonce=join.nonce,
            run=self.run.id,
            bundle=self.bundle,
            model=self.model,
            heartbeat=known.heartbeat if (known := self.registry.get(device)) else self.registry.heartbeat,
            come_back=come_back,
        )
        self._desk.tell(device, welcome)
        if self.finished:
            self._desk.tell(device, Finished(run=self.run.id, model=self.model))
        if call is not None and at_work:
            call.ask([device], now)

    def _on_gone(self, device: str, now: float) -> None:
        if self.work is None:
            return
        self.work.cohort.withdraw(device)
        self._admission.hold(device)
        if not self.registry.holds_lease(device, now) and self.work.cohort.lose(device):
            self.on_status(f"device {device} has gone in round {self.work.key.round}")


def cancel_of(work: Assignment, device: str, reason: str) -> Cancel:
    """The message that takes a device's present task back."""
    key = work.key
    return Cancel(
        run=key.run,
        round=work.round_of(device),
        attempt=key.attempt,
        kind=key.kind,
        hop=work.hop_of(device),
        reason=reason,
    )
