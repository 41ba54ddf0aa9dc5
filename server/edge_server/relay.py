"""The chains of one round as a cohort: in each of them one device has its turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge_server.chain import Chain
from edge_server.cohort import Standing


class Relay:
    """Asks the first device of each chain, then the next; it has the face of a :class:`Cohort`.

    A device that fails is skipped, and nobody replaces it.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.chains = list(chains)
        self.wanted = sum(len(chain.devices) for chain in chains)
        self._chain_of = {device: chain for chain in chains for device in chain.devices}
        self._turns: dict[str, Standing] = {}
        self._back: set[str] = set()

    def chain_of(self, device: str) -> Chain | None:
        """The chain that the device is in."""
        return self._chain_of.get(device)

    def call(self, *, returning: bool = False) -> list[str]:  # noqa: ARG002 - a chain has no newcomers
        """The devices whose turn has come, or who have come back to it."""
        called = []
        for chain in self.chains:
            device = chain.device
            if device is not None and (device not in self._turns or device in self._back):
                self._turns[device] = Standing.ASKED
                self._back.discard(device)
                called.append(device)
        return called

    def volunteer(self, device: str) -> None:
        """A device has come back: it gets its turn if that is still on."""
        if self._turns.get(device) == Standing.LOST:
            self._back.add(device)

    def has_place_for(self, device: str) -> bool:
        """Whether the device's turn is on or to come."""
        chain = self.chain_of(device)
        return chain is not None and chain.device is not None

    def withdraw(self, device: str) -> None:
        """A device has gone."""
        self._back.discard(device)

    def take(self, device: str) -> None:
        """The device has its task."""
        if self._turns.get(device) in (Standing.ASKED, Standing.LOST):
            self._turns[device] = Standing.TAKEN

    def accept(self, device: str) -> None:
        """The device's hop is in, and its chain has gone on."""
        self._turns.pop(device, None)

    def lose(self, device: str) -> bool:
        """The device has gone and may come back; False if it was not at work."""
        if self._turns.get(device) not in (Standing.ASKED, Standing.TAKEN):
            return False
        self._turns[device] = Standing.LOST
        return True

    def drop(self, device: str) -> bool:
        """The device has failed: its chain goes on without it. False if it was not its turn."""
        if self._turns.pop(device, None) is None:
            return False
        self._back.discard(device)
        self._chain_of[device].skip()
        return True

    def standing(self, device: str) -> Standing | None:
        """Where the device stands in its turn; None if it is not on."""
        return self._turns.get(device)

    @property
    def selected(self) -> list[str]:
        """All devices, chain by chain."""
        return list(self._chain_of)

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
        """Those with a hop that is in."""
        return [device for chain in self.chains for device in chain.delivered]

    @property
    def lost(self) -> list[str]:
        """Those that have gone in their turn and may come back."""
        return list(self._with(Standing.LOST))

    @property
    def complete(self) -> bool:
        """Whether all chains are at their end."""
        return all(chain.device is None for chain in self.chains)

    @property
    def exhausted(self) -> bool:
        """Whether nobody works and nobody's turn is to come."""
        return self.complete

    def _with(self, *standings: Standing) -> Iterator[str]:
        return (device for device, standing in self._turns.items() if standing in standings)
