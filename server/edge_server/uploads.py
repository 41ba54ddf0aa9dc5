"""Updates on their way in: which device may send which chunks, so that no broker's queue overflows."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.errors import ProtocolError
from edge_sdk.partial import Partial
from edge_sdk.protocol import Chunk, Incoming, chunk_count
from edge_sdk.protocol.messages import Grant, Offer, Ref
from edge_sdk.tensors import sha256

logger = logging.getLogger(__name__)

OUTSTANDING = 256
"""Chunks granted and not yet here, over all devices: what one subscriber's queue holds with room."""
WINDOW = 16
"""Chunks granted to one device at a time."""
STALL = 6.0
"""Seconds without a chunk after which a device's range is granted anew, after the others'."""
ON_THE_WAY = 10.0
"""Seconds for which chunks that are no longer waited for may still stand in the broker's queue."""
UNWRITABLE = (
    "the work folder cannot be written ({}); nothing is lost: make room on its disk, then give the same "
    "command again"
)


@dataclass(slots=True)
class _Upload:
    offer: Offer
    incoming: Incoming
    span: tuple[int, int] | None = None
    moved: float = 0.0
    held: bool = False
    resumed: bool = False

    def whole(self) -> tuple[Offer, bytes] | None:
        """The offer and its bytes once all are here; ProtocolError if they are not what was announced."""
        if self.incoming.next_range(1) is not None:
            return None
        try:
            return self.offer, self.incoming.finish()
        except ProtocolError:
            if not self.resumed:
                raise
            # The disk may be wrong, and not the device: all of it is granted once more.
            logger.warning("what was kept of the upload %s is damaged", self.offer.blob.hash[:12])
            self.resumed = False
            return None


class Uploads:
    """The uploads of all devices, one each, granted in turn.

    Those of more than WINDOW chunks lie in ``folder`` until they are dropped, and go on over a restart. Each
    device has a sub-folder of its own there, so that none can touch what another sends.

    Raises:
        RunError: from every method that begins an upload or adds to it: ``folder`` cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._uploads: dict[str, _Upload] = {}
        self._given_up: list[tuple[float, int]] = []

    def begin(self, device: str, offer: Offer, *, limit: int) -> tuple[Offer, bytes] | None:
        """Expect what ``offer`` announces; an offer that is repeated goes on where it was.

        Returns:
            The offer and the whole update, if all of it had come before a restart.

        Raises:
            ProtocolError: the announced size is over ``limit`` bytes.
        """
        known = self._uploads.get(device)
        if known is not None and known.offer == offer:
            known.held = False
            return None
        incoming = Incoming(offer.blob, limit=limit, storage=self._kept(device, offer.blob))
        resumed = incoming.began(0, incoming.count)
        known = self._uploads[device] = _Upload(offer, incoming, resumed=resumed)
        return known.whole()

    def add(self, device: str, chunk: Chunk, now: float) -> tuple[Offer, bytes] | None:
        """Take a chunk in; the offer and the whole update when it was the last.

        What is kept of it on disk is there until :meth:`drop`.

        Raises:
            ProtocolError: the whole is not what was announced.
        """
        upload = self._uploads.get(device)
        if upload is None or not upload.incoming.add(chunk):
            return None
        upload.moved = now
        if upload.span is not None and not upload.incoming.missing_in(*upload.span):
            upload.span = None
        return upload.whole()

    def hold(self, device: str) -> None:
        """Grant nothing to the device until it offers again; what it has sent is kept."""
        if device in self._uploads:
            self._uploads[device].held = True
            self._give_up(self._uploads[device])

    def drop(self, device: str) -> Offer | None:
        """Expect nothing more of the device; returns what it had offered."""
        shutil.rmtree(self._folder_of(device), ignore_errors=True)
        upload = self._uploads.pop(device, None)
        if upload is None:
            return None
        self._give_up(upload)
        return upload.offer

    def clear(self) -> None:
        """Expect nothing more of anyone, nor of whom a server before this one did."""
        for upload in self._uploads.values():
            self._give_up(upload)
        self._uploads.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

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

    def _kept(self, device: str, ref: Ref) -> Partial | None:
        """Where the chunks are kept over a restart, with those that are there; None for few."""
        folder = self._folder_of(device)
        if not (folder / f"{ref.hash}.part").exists():
            # Of what a device offered before, nothing is expected.
            shutil.rmtree(folder, ignore_errors=True)
        return Partial(folder, ref, unwritable=UNWRITABLE) if chunk_count(ref) > WINDOW else None

    def _folder_of(self, device: str) -> Path:
        # Ids that differ by case alone are one name to some disks.
        return self._folder / sha256(device.encode())

    def _give_up(self, upload: _Upload, now: float | None = None) -> None:
        """Wait for a range no longer; for a while its chunks still count as outstanding."""
        if upload.span is not None:
            count = upload.span[1] - upload.span[0]
            self._given_up.append(((upload.moved if now is None else now) + ON_THE_WAY, count))
        upload.span = None
