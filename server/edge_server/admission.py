"""How a result gets in: offered, fetched by grants, validated whole, stored, counted, acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edge_sdk.errors import ProtocolError, TensorError
from edge_sdk.protocol import Chunk
from edge_sdk.protocol.messages import Offer, Receipt, Report, key_of
from edge_server.assignment import Assignment
from edge_server.desk import Desk
from edge_server.rows import AcceptedResult
from edge_server.store import Store
from edge_server.uploads import Uploads


@dataclass(slots=True, kw_only=True)
class Admission:
    """Lets results into the work that is out.

    Args:
        on_refused: called with a sentence when the content of a result is refused.
    """

    desk: Desk
    store: Store
    on_refused: Callable[[str], None]
    _uploads: Uploads = field(init=False)
    _work: Assignment | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._uploads = Uploads(self.store.work_dir / "uploads")

    def open(self, work: Assignment) -> None:
        """From now on results are taken for this work; those that are on their way stay so."""
        self._work = work

    def close(self) -> None:
        """From now on no result is taken."""
        self._uploads.clear()
        self._work = None

    def hold(self, device: str) -> None:
        """The device has gone: it gets no grants until it offers again what it has begun to send."""
        self._uploads.hold(device)

    def forget(self, device: str) -> None:
        """The device will not send what it has offered."""
        self._uploads.drop(device)

    def offer(self, device: str, offer: Offer) -> None:
        """Answer an offer: with a receipt if its fate is known, with grants (by :meth:`tick`) else."""
        work = self._work
        if work is None or not work.is_keyed(device, offer):
            self.acknowledge(device, offer, self._refusal_of_late(device, offer))
        elif work.hashes.get(device) == offer.blob.hash:
            self.acknowledge(device, offer, None)
        elif reason := work.refusal(device, offer, self.store.declared(device, offer)):
            # With over-selection it is the rule that some come too late.
            if work.cohort.drop(device) and not work.cohort.complete:
                self.on_refused(f"the update of {device} is refused: {reason}")
            self.acknowledge(device, offer, reason)
        else:
            work.cohort.take(device)
            self._take_in(device, self._uploads.begin(device, offer, limit=work.largest()))

    def chunk(self, device: str, chunk: Chunk, now: float) -> None:
        """Take a chunk; with the last one the result is accepted or refused, whole."""
        try:
            done = self._uploads.add(device, chunk, now)
        except ProtocolError as error:
            offer = self._uploads.drop(device)
            if offer is not None and self._work is not None:
                self._work.cohort.drop(device)
                self.on_refused(f"the update of {device} is refused: {error}")
                self.acknowledge(device, offer, str(error))
            return
        self._take_in(device, done)

    def _take_in(self, device: str, whole: tuple[Offer, bytes] | None) -> None:
        if whole is not None and self._work is not None:
            refusal = self._admit(self._work, device, *whole)
            # Not before: a store that cannot be written now is to have it after a restart.
            self._uploads.drop(device)
            self.acknowledge(device, whole[0], refusal)

    def _admit(self, work: Assignment, device: str, offer: Offer, data: bytes) -> str | None:
        """Take a result that is here whole; the reason if it is refused."""
        if reason := work.refusal(device, offer, self.store.declared(device, offer)):
            return reason
        try:
            tensors = work.check(device, data, offer.examples)
        except TensorError as error:
            work.cohort.drop(device)
            self.on_refused(f"the update of {device} is refused: {error}")
            return str(error)
        self.store.accept(device, offer, data, counted=work.key.round)
        result = AcceptedResult(device, offer.blob.hash, offer.examples, len(data), offer.hop, offer.round)
        work.add(result, tensors)
        return None

    def tick(self, now: float) -> None:
        """Send the grants that are due."""
        for device, grant in self._uploads.grants(now):
            self.desk.tell(device, grant)

    def _refusal_of_late(self, device: str, offer: Offer) -> str | None:
        """None if this very result was counted and only its receipt was lost."""
        for result in self.store.results(offer):
            if (result.device, result.hash, result.hop) == (device, offer.blob.hash, offer.hop):
                return None
        now_at = f"round {self._work.key.round} is open" if self._work else "no round is open"
        return f"round {offer.round} (attempt {offer.attempt}) is closed; {now_at}"

    def acknowledge(self, device: str, result: Offer | Report, refusal: str | None) -> None:
        """Send the receipt for a result: accepted, or refused with a reason."""
        receipt = Receipt(
            **key_of(result),
            accepted=refusal is None,
            reason=(refusal or "")[:500],
            blob=result.blob.hash if isinstance(result, Offer) else None,
        )
        self.desk.tell(device, receipt)
