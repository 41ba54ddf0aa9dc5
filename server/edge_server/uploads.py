"""Updates on their way in: which device may send which chunks, so that no broker's queue overflows."""

from __future__ import annotations

from dataclasses import dataclass

from edge_sdk.protocol import Chunk, Incoming
from edge_sdk.protocol.messages import Grant, Offer

OUTSTANDING = 256
"""Chunks granted and not yet here, over all devices: what one subscriber's queue holds with room."""
WINDOW = 16
"""Chunks granted to one device at a time."""
STALL = 6.0
"""Seconds without a chunk after which a device's range is granted anew, after the others'."""
ON_THE_WAY = 10.0
"""Seconds for which chunks that are no longer waited for may still stand in the broker's queue."""


@dataclass(slots=True)
class _Upload:
    offer: Offer
    incoming: Incoming
    span: tuple[int, int] | None = None
    moved: float = 0.0
    held: bool = False


class Uploads:
    """The uploads of all devices, one each, granted in turn."""

    def __init__(self) -> None:
        self._uploads: dict[str, _Upload] = {}
        self._given_up: list[tuple[float, int]] = []

    def begin(self, device: str, offer: Offer, *, limit: int) -> None:
        """Expect what ``offer`` announces; an offer that is repeated goes on where it was.

        Raises:
            ProtocolError: the announced size is over ``limit`` bytes.
        """
        known = self._uploads.get(device)
        if known is None or known.offer != offer:
            known = self._uploads[device] = _Upload(offer, Incoming(offer.blob, limit=limit))
        known.held = False

    def add(self, device: str, chunk: Chunk, now: float) -> tuple[Offer, bytes] | None:
        """Take a chunk in; the offer and the whole update when it was the last.

        Raises:
            ProtocolError: the whole is not what was announced.
        """
        upload = self._uploads.get(device)
        if upload is None or not upload.incoming.add(chunk):
            return None
        upload.moved = now
        if upload.span is not None and not upload.incoming.missing_in(*upload.span):
            upload.span = None
        if upload.incoming.next_range(1) is not None:
            return None
        data = upload.incoming.finish()
        del self._uploads[device]
        return upload.offer, data

    def hold(self, device: str) -> None:
        """Grant nothing to the device until it offers again; what it has sent is kept."""
        if device in self._uploads:
            self._uploads[device].held = True
            self._give_up(self._uploads[device])

    def drop(self, device: str) -> Offer | None:
        """Expect nothing more of the device; returns what it had offered."""
        upload = self._uploads.pop(device, None)
        if upload is None:
            return None
        self._give_up(upload)
        return upload.offer

    def clear(self) -> None:
        """Expect nothing more of anyone."""
        for upload in self._uploads.values():
            self._give_up(upload)
        self._uploads.clear()

    def grants(self, now: float) -> list[tuple[str, Grant]]:
        """The grants to send now. A stalled device gives its share back and waits behind the others."""
        for device, upload in list(self._uploads.items()):
            if upload.span is not None and now - upload.moved > STALL:
                self._give_up(upload, now)
                self._uploads[device] = self._uploads.pop(device)
        self._given_up = [(until, count) for until, count in self._given_up if until > now]
        free = OUTSTANDING - sum(count for _, count in self._given_up)
        free -= sum(u.span[1] - u.span[0] for u in self._uploads.values() if u.span)
        free = max(free, 0)
        granted = []
        for device, upload in self._uploads.items():
            ready = free and upload.span is None and not upload.held
            span = upload.incoming.next_range(min(WINDOW, free)) if ready else None
            if span is not None:
                upload.span, upload.moved = span, now
                free -= span[1] - span[0]
                granted.append((device, Grant(blob=upload.offer.blob.hash, start=span[0], stop=span[1])))
        return granted

    def _give_up(self, upload: _Upload, now: float | None = None) -> None:
        """Wait for a range no longer; for a while its chunks still count as outstanding."""
        if upload.span is not None:
            count = upload.span[1] - upload.span[0]
            self._given_up.append(((upload.moved if now is None else now) + ON_THE_WAY, count))
        upload.span = None
