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
            self._uploads[device].span = None

    def drop(self, device: str) -> Offer | None:
        """Expect nothing more of the device; returns what it had offered."""
        upload = self._uploads.pop(device, None)
        return upload.offer if upload is not None else None

    def clear(self) -> None:
        """Expect nothing more of anyone."""
        self._uploads.clear()

    def grants(self, now: float) -> list[tuple[str, Grant]]:
        """The grants to send now. A stalled device gives its share back and waits behind the others."""
        for device, upload in list(self._uploads.items()):
            if upload.span is not None and now - upload.moved > STALL:
                upload.span = None
                self._uploads[device] = self._uploads.pop(device)
        free = OUTSTANDING - sum(u.span[1] - u.span[0] for u in self._uploads.values() if u.span)
        granted = []
        for device, upload in self._uploads.items():
            ready = free and upload.span is None and not upload.held
            span = upload.incoming.next_range(min(WINDOW, free)) if ready else None
            if span is not None:
                upload.span, upload.moved = span, now
                free -= span[1] - span[0]
                granted.append((device, Grant(blob=upload.offer.blob.hash, start=span[0], stop=span[1])))
        return granted
