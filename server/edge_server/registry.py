"""Which devices are there. Kept by the server, never read out of retained messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_sdk.protocol.messages import Join

HEARTBEAT = 20
"""Least seconds between two heartbeats of a device."""
HEARTBEATS = 50
"""Most heartbeats a second, of a whole fleet: what stands in the broker's queue while a server pauses."""
MISSED = 3
"""Heartbeats after which a silent device counts as gone."""

KEPT_BOOTS = 8
"""Processes of an install that are told apart, and of its copies."""
RESERVED = 30.0
"""Seconds for which the id of a device that has gone stays its own: a will may tell of a short loss only."""
FORGOTTEN = 24 * 3600.0
"""Seconds after which a device that has gone is forgotten."""


@dataclass(slots=True)
class Device:
    """One device as the server knows it. Times are the server's monotonic seconds.

    ``boots`` are the processes of this install, in the order in which they first came; ``copies`` those that
    were found to run on a copy of its work folder.
    """

    id: str
    install: str
    boots: list[str]
    nonce: str
    examples: int
    last_seen: float
    heartbeat: int = HEARTBEAT
    lease_until: float | None = None
    present: bool = True
    left_at: float = 0.0
    copies: list[str] = field(default_factory=list)


class Registry:
    """The devices of one fleet: an id belongs to one install while that is present."""

    def __init__(self) -> None:
        self._devices: dict[str, Device] = {}

    def __len__(self) -> int:
        """How many devices are known, there or not."""
        return len(self._devices)

    def join(self, device: str, join: Join, now: float) -> str | None:
        """Take a join in; the reason if it is refused, and the device that was there goes on undisturbed.

        An install that starts again is welcome. A copy of a work folder is told apart by its process: one
        that was followed by another and comes back has never ended, so what followed it is the copy.
        """
        known = self._devices.get(device)
        boots, copies = [join.boot], list[str]()
        if known is not None and known.install == join.install:
            if join.boot in known.copies:
                return "its work folder is a copy of another device's: give it its own --work-dir and --id"
            boots = [*known.boots[-KEPT_BOOTS:], join.boot]
            first = boots.index(join.boot)
            followed = [boot for boot in boots[first:] if boot != join.boot]
            boots, copies = boots[: first + 1], [*known.copies, *followed][-KEPT_BOOTS:]
        elif known is not None and (known.present or now - known.left_at < RESERVED):
            return "its id is in use by another device of this fleet, or was just now: give it another --id"
        lease_until = None if join.lease is None else now + join.lease
        self._devices[device] = Device(
            device,
            join.install,
            boots,
            join.nonce,
            join.examples,
            now,
            heartbeat=self.heartbeat,
            lease_until=lease_until,
            copies=copies,
        )
        return None

    def here(self, device: str, nonce: str, examples: int, now: float) -> bool:
        """Take a heartbeat in; False if the server does not know this connection and must ask who it is."""
        known = self._devices.get(device)
        if known is None or known.nonce != nonce:
            return False
        known.last_seen, known.examples, known.present = now, examples, True
        return True

    def leave(self, device: str, nonce: str, now: float) -> bool:
        """Take a goodbye or a will in; False if it is that of an older connection."""
        known = self._devices.get(device)
        if known is None or known.nonce != nonce or not known.present:
            return False
        known.present, known.left_at = False, now
        return True

    def expire(self, now: float) -> list[str]:
        """Mark those that have been silent too long as gone; returns their ids."""
        gone = [d for d in self._devices.values() if d.present and now - d.last_seen > d.heartbeat * MISSED]
        for device in gone:
            device.present, device.left_at = False, now
        for device in [d for d in self._devices.values() if not d.present]:
            if now - device.left_at > FORGOTTEN:
                del self._devices[device.id]
        return [device.id for device in gone]

    @property
    def heartbeat(self) -> int:
        """Seconds between the heartbeats of a device that joins now: the more devices, the more."""
        return max(HEARTBEAT, len(self._devices) // HEARTBEATS)

    def get(self, device: str) -> Device | None:
        """What is known of a device."""
        return self._devices.get(device)

    def is_present(self, device: str) -> bool:
        """Whether the device is there now."""
        known = self._devices.get(device)
        return known is not None and known.present

    def holds_lease(self, device: str, now: float) -> bool:
        """Whether the device, there or not, may still hand in what it took under its lease."""
        known = self._devices.get(device)
        return known is not None and known.lease_until is not None and known.lease_until > now

    def present(self, now: float) -> list[str]:
        """Ids of those present whose lease has not run out, sorted: the same whatever the order of joins."""
        return sorted(
            d.id
            for d in self._devices.values()
            if d.present and (d.lease_until is None or d.lease_until > now) and d.examples > 0
        )
