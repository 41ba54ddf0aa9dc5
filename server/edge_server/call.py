"""A cohort at work: each device is asked until it answers, and replaced when it fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from edge_sdk.protocol.messages import Task
from edge_server.cohort import Cohort
from edge_server.desk import Desk
from edge_server.registry import Registry
from edge_server.relay import Relay

ASK_AGAIN = 4.0
"""Seconds after which a task that nobody has taken is sent again."""


@dataclass(slots=True, kw_only=True)
class Call:
    """Work that is out with a cohort until a deadline. Times are the server's monotonic seconds.

    Args:
        make_task: from a device, its connection's nonce and the seconds left to the task it is sent.
        on_called: called when further devices are asked.
        turn: seconds that a device has where ``rolling``.
        rolling: whether each device has a deadline of its own.
        turn_of: tells the turns of a device apart; coming back does not begin one anew.
        grace: seconds that lost devices, whom nobody can replace, have to come back.
        kept_until: until then the places of lost devices are kept for them.
    """

    cohort: Cohort | Relay
    deadline: float
    turn: float
    rolling: bool
    registry: Registry
    desk: Desk
    make_task: Callable[[str, str, float], Task]
    on_called: Callable[[], None]
    grace: float
    turn_of: Callable[[str], Hashable]
    kept_until: float = 0.0
    _asked_at: dict[str, float] = field(default_factory=dict, init=False)
    _began: dict[tuple[str, Hashable], float] = field(default_factory=dict, init=False)
    _lost_since: dict[str, float] = field(default_factory=dict, init=False)
    _exhausted_since: float | None = field(default=None, init=False)

    def carry_over(self, earlier: Call) -> None:
        """Devices that go on with what they do have the rest of their time."""
        self._began, self._asked_at = earlier._began, earlier._asked_at

    def ask(self, devices: list[str], now: float) -> None:
        """Send the task to those of ``devices`` that are there."""
        for device in devices:
            known = self.registry.get(device)
            if known is not None and known.present:
                left = self.deadline - now
                if self.rolling:
                    left = min(left, self._begin(device, now) + self.turn - now)
                self.desk.tell(device, self.make_task(device, known.nonce, left))
                self._asked_at[device] = now

    def collected(self, now: float) -> bool:
        """Keep the cohort at work; True when there is nothing more to wait for."""
        cohort = self.cohort
        if cohort.complete or now >= self.deadline:
            return True
        called = cohort.call(returning=now < self.kept_until)
        if called:
            self.on_called()
        overdue = [d for d in cohort.unanswered if now - self._asked_at.get(d, 0.0) > ASK_AGAIN]
        self.ask(list(dict.fromkeys([*called, *overdue])), now)
        if not cohort.exhausted:
            self._exhausted_since = None
            return False
        self._exhausted_since = self._exhausted_since or now
        return not cohort.lost or now - self._exhausted_since > self.grace

    def late(self, now: float) -> list[str]:
        """Devices that have had their task too long, or have been lost in their turn for too long."""
        if not self.rolling:
            return []
        for device in self.cohort.pending:
            # Its turn may have come while it was away.
            if not self.registry.is_present(device) and not self.registry.holds_lease(device, now):
                self.cohort.lose(device)
        # Only a chain waits for who is lost.
        lost = self.cohort.lost if isinstance(self.cohort, Relay) else []
        self._lost_since = {device: self._lost_since.get(device, now) for device in lost}
        gone = [d for d in lost if now - self._lost_since[d] > self.grace]
        slow = [d for d in self.cohort.pending if now - self._begin(d, now) > self.turn]
        return gone + slow

    def _begin(self, device: str, now: float) -> float:
        """When the device's present turn began."""
        return self._began.setdefault((device, self.turn_of(device)), now)

    def overdue(self, now: float) -> list[str]:
        """Devices that went under a lease which has run out with their work not handed in."""
        absent = [device for device in self.cohort.pending if not self.registry.is_present(device)]
        return [d for d in absent if self.registry.get(d) and not self.registry.holds_lease(d, now)]
