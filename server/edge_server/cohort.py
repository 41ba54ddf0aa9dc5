"""The devices of one attempt at a round: who is asked, who has delivered, who is replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum


class Standing(str, Enum):
    """Where a selected device stands."""

    ASKED = "asked"
    TAKEN = "taken"
    ACCEPTED = "accepted"
    LOST = "lost"
    DROPPED = "dropped"


class Cohort:
    """Keeps as many devices busy as are asked for, and stops at as many results as are wanted.

    Args:
        wanted: results that complete the cohort.
        asked: devices that work at a time, at least ``wanted``; more with over-selection.
        order: every eligible device in the order in which they are asked.
        groups: by device, the group that it stands for. A group that nobody stands for comes first, so that
            a device that fails is replaced by one of its own group as long as there is any.
        refilled: the place of a device that has delivered goes to another one.
    """

    def __init__(
        self,
        *,
        wanted: int,
        asked: int,
        order: Iterable[str],
        groups: Mapping[str, int] | None = None,
        refilled: bool = False,
    ) -> None:
        self.wanted = wanted
        self._refilled = refilled
        self._asked = asked
        self._candidates = list(order)
        self._groups = groups or {}
        self._standing: dict[str, Standing] = {}

    @classmethod
    def restored(cls, *, wanted: int, asked: int, selected: Iterable[str], refilled: bool = False) -> Cohort:
        """A cohort whose server has started anew: all that were asked count as lost until they answer."""
        cohort = cls(wanted=wanted, asked=asked, order=(), refilled=refilled)
        cohort._standing = dict.fromkeys(selected, Standing.LOST)
        return cohort

    def carry_over(self, earlier: Cohort) -> None:
        """Those who work in ``earlier`` go on with what they do; those it has lost may come back."""
        self._standing |= {d: earlier._standing[d] for d in [*earlier.pending, *earlier.lost]}
        self._candidates = [device for device in self._candidates if device not in self._standing]

    def call(self, *, returning: bool = False) -> list[str]:
        """Fill the places that are free; returns the devices that are newly asked.

        Args:
            returning: ask only those that were asked before and have come back. They are asked first in
                any case, so that a round whose devices come back keeps them.
        """
        kept = 0 if self._refilled else len(self.accepted)
        free = max(self._asked - len(self.pending) - kept, 0)
        called = [device for device in self._candidates if device in self._standing][:free]
        if not returning:
            called += self._newcomers(free - len(called), called)
        self._candidates = [device for device in self._candidates if device not in called]
        self._standing |= dict.fromkeys(called, Standing.ASKED)
        return called

    def _newcomers(self, free: int, called: list[str]) -> list[str]:
        """The first candidates that were never asked, those of the groups first that fewest stand for."""
        new = [device for device in self._candidates if device not in self._standing]
        if not self._groups:
            return new[:free]
        taken: list[str] = []
        while new and len(taken) < free:
            busy = Counter(map(self._groups.get, [*self.pending, *self.accepted, *called, *taken]))
            taken.append(min(new, key=lambda device: busy[self._groups.get(device)]))
            new.remove(taken[-1])
        return taken

    def volunteer(self, device: str) -> None:
        """A device that has come, or come back, during the round may replace one that fails."""
        fresh = self._standing.get(device, Standing.LOST) == Standing.LOST
        if fresh and device not in self._candidates:
            self._candidates.append(device)

    def has_place_for(self, device: str) -> bool:
        """Whether a device may still be asked, which has neither delivered nor declined."""
        busy = len(self.pending) + len(self.accepted)
        return busy < self.wanted and self._standing.get(device, Standing.LOST) == Standing.LOST

    def withdraw(self, device: str) -> None:
        """A device that has gone cannot replace one that fails."""
        if device in self._candidates:
            self._candidates.remove(device)

    def take(self, device: str) -> None:
        """The device has its task; one that was lost has come back to it."""
        if self._standing.get(device) in (Standing.ASKED, Standing.LOST):
            self._standing[device] = Standing.TAKEN
            # It came back to what it has, and must not be asked for more.
            self.withdraw(device)

    def accept(self, device: str) -> None:
        """The device's result is in."""
        self._standing[device] = Standing.ACCEPTED
        self.withdraw(device)

    def lose(self, device: str) -> bool:
        """The device has gone and may come back; False if it was not at work."""
        return self._give_up(device, Standing.LOST)

    def drop(self, device: str) -> bool:
        """The device will not deliver in this attempt; False if it was not at work."""
        return self._give_up(device, Standing.DROPPED)

    def standing(self, device: str) -> Standing | None:
        """Where a device stands; None if it was never asked."""
        return self._standing.get(device)

    def reconsider(self, present: Iterable[str]) -> list[str]:
        """Those of ``present`` who have declined or were too slow may be asked again; returns them."""
        again = [d for d in present if self._standing.get(d) == Standing.DROPPED]
        self._candidates += [device for device in again if device not in self._candidates]
        return again

    @property
    def selected(self) -> list[str]:
        """All that were ever asked, in order."""
        return list(self._standing)

    @property
    def pending(self) -> list[str]:
        """Those that work."""
        return list(self._with(Standing.ASKED, Standing.TAKEN))

    @property
    def unanswered(self) -> list[str]:
        """Those that have not said that they have their task."""
        return list(self._with(Standing.ASKED))

    @property
    def accepted(self) -> list[str]:
        """Those whose results are in."""
        return list(self._with(Standing.ACCEPTED))

    @property
    def lost(self) -> list[str]:
        """Those that have gone and may come back."""
        return list(self._with(Standing.LOST))

    @property
    def complete(self) -> bool:
        """Whether as many results are in as are wanted."""
        return len(self.accepted) >= self.wanted

    @property
    def exhausted(self) -> bool:
        """Whether nobody works and nobody is left to ask."""
        return not self.pending and not self._candidates

    def _give_up(self, device: str, standing: Standing) -> bool:
        if self._standing.get(device) not in (Standing.ASKED, Standing.TAKEN):
            return False
        self._standing[device] = standing
        return True

    def _with(self, *standings: Standing) -> Iterator[str]:
        return (device for device, standing in self._standing.items() if standing in standings)
