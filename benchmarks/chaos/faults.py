"""What is done to a fleet, and when: a plan drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of ``kind``.

    It happens ``after`` seconds after the one before it, or after the first receipt that comes then if it is
    to meet a fleet that works (``calm``); if ``upon`` is not empty, as soon as a message of that kind passes
    thereafter, or just ``before`` it does.

    ``victim`` is a service (``server``, ``broker``, ``d3``), or ``device`` for the one whose message that
    was; empty where all are meant. A service is away, or links are bad, for ``lasts`` seconds.
    """

    kind: str
    victim: str
    calm: bool
    after: float
    upon: str
    before: bool
    lasts: float


KINDS: dict[str, tuple[str, float]] = {
    "server killed": ("server", 2.0),
    "broker killed": ("broker", 2.0),
    "device killed": ("device", 2.0),
    "server stopped": ("server", 4.0),
    "broker stopped": ("broker", 4.0),
    "device stopped": ("device", 6.0),
    "link cut": ("client", 0.0),
    "download cut": ("client", 0.0),
    "upload cut": ("client", 0.0),
    "links stalled": ("client", 5.0),
    "messages delayed": ("", 4.0),
    "messages doubled": ("", 4.0),
    "messages reordered": ("", 4.0),
}
"""By kind whom it befalls, and the most seconds that it lasts. A client is the server or a device; its
downloads and uploads are cut in the middle of a chunk."""

UPON = ("join", "task", "model", "taken", "chunk", "grant", "offer", "receipt")
"""Half of the faults come with a message that means something, the others whenever it may be."""

CALM = 0.6
"""Share of the faults that meet a fleet which works again after the fault before; others come in bursts."""

FLEET_LOST = "fleet lost"
"""All devices are killed at once, for longer than the grace of a run that repeats a round then."""


def plan(devices: list[str], *, seed: list[int], pause: float, lost: float = 0.0) -> Iterator[Fault]:
    """Faults without end: every kind once, in random order, then again in another.

    Args:
        pause: mean seconds between two faults.
        lost: seconds for which all devices are away at once; 0 for a plan without that.
    """
    rng = np.random.default_rng(seed)
    victims = {"server": ["server"], "broker": ["broker"], "device": devices, "": [""]}
    victims["client"] = ["server", *devices]
    kinds = [*KINDS, FLEET_LOST] if lost else list(KINDS)
    while True:
        for kind in rng.permutation(kinds):
            whom, longest = KINDS.get(kind, ("", 0.0))
            victim, upon = str(rng.choice(victims[whom])), str(rng.choice(UPON) if rng.random() < 0.5 else "")
            if upon and victim in devices:
                victim = "device"
            lasts = lost if kind == FLEET_LOST else float(rng.uniform(0.1, 1.0) * longest)
            calm, after = bool(rng.random() < CALM), float(rng.exponential(pause))
            before = bool(rng.random() < 0.5) and str(kind).endswith(("killed", "stopped"))
            if kind == FLEET_LOST:
                # Only a round that is under way can be repeated.
                calm, upon, before = True, "taken", True
            yield Fault(str(kind), victim, calm, after, upon, before, lasts)
