"""How an update gets in: offered, fetched by grants, validated whole, stored, counted, acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edge_sdk.bundle import Bundle
from edge_sdk.errors import ProtocolError, TensorError
from edge_sdk.protocol import Chunk
from edge_sdk.protocol.messages import Offer, Receipt, Report
from edge_server.config import RunConfig
from edge_server.desk import Desk
from edge_server.rounds import TrainingRound
from edge_server.store import AcceptedUpdate, Store
from edge_server.uploads import Uploads


@dataclass(slots=True, kw_only=True)
class Admission:
    """Lets updates into the open round.

    Args:
        on_refused: called with a sentence when the content of an update is refused.
    """

    desk: Desk
    store: Store
    bundle: Bundle
    config: RunConfig
    on_refused: Callable[[str], None]
    _uploads: Uploads = field(default_factory=Uploads, init=False)
    _round: TrainingRound | None = field(default=None, init=False)

    def open(self, training: TrainingRound) -> None:
        """From now on updates of this attempt are taken."""
        self._uploads.clear()
        self._round = training

    def close(self) -> None:
        """From now on no update is taken."""
        self._uploads.clear()
        self._round = None

    def hold(self, device: str) -> None:
        """The device has gone: it gets no grants until it offers again what it has begun to send."""
        self._uploads.hold(device)

    def forget(self, device: str) -> None:
        """The device will not send what it has offered."""
        self._uploads.drop(device)

    def offer(self, device: str, offer: Offer) -> None:
        """Answer an offer: with a receipt if its fate is known, with grants (by :meth:`tick`) else."""
        training = self._round
        if training is None or not training.is_keyed(offer):
            self.acknowledge(device, offer, self._refusal_of_late(device, offer))
        elif training.hashes.get(device) == offer.blob.hash:
            self.acknowledge(device, offer, None)
        elif reason := self._refusal(training, device, offer):
            # With over-selection it is the rule that some come too late.
            if training.cohort.drop(device) and not training.cohort.complete:
                self.on_refused(f"the update of {device} is refused: {reason}")
            self.acknowledge(device, offer, reason)
        else:
            training.cohort.take(device)
            self._uploads.begin(device, offer, limit=training.largest_update(self.bundle))

    def chunk(self, device: str, chunk: Chunk, now: float) -> None:
        """Take a chunk; with the last one the update is accepted or refused, whole."""
        try:
            done = self._uploads.add(device, chunk, now)
        except ProtocolError as error:
            offer = self._uploads.drop(device)
            if offer is not None and self._round is not None:
                self._round.cohort.drop(device)
                self.on_refused(f"the update of {device} is refused: {error}")
                self.acknowledge(device, offer, str(error))
            return
        if done is None or self._round is None:
            return
        offer, data = done
        reason = self._round.refusal(self.config, device, offer)
        if reason is None:
            try:
                self._round.check(self.bundle, data)
            except TensorError as error:
                reason = str(error)
                self._round.cohort.drop(device)
                self.on_refused(f"the update of {device} is refused: {reason}")
            else:
                self.store.accept(device, offer, data)
                update = AcceptedUpdate(device, offer.blob.hash, offer.examples, len(data))
                self._round.add(self.bundle, update, data)
        self.acknowledge(device, offer, reason)

    def tick(self, now: float) -> None:
        """Send the grants that are due."""
        for device, grant in self._uploads.grants(now):
            self.desk.tell(device, grant)

    def _refusal(self, training: TrainingRound, device: str, offer: Offer) -> str | None:
        limit = training.largest_update(self.bundle)
        if offer.blob.size > limit:
            return f"an update of {offer.blob.size} bytes is over this model's limit of {limit}"
        return training.refusal(self.config, device, offer)

    def _refusal_of_late(self, device: str, offer: Offer) -> str | None:
        """None if this very update was counted and only its receipt was lost."""
        for update in self.store.updates(offer):
            if update.device == device and update.hash == offer.blob.hash:
                return None
        now_at = f"round {self._round.row.round} is open" if self._round else "no round is open"
        return f"round {offer.round} (attempt {offer.attempt}) is closed; {now_at}"

    def acknowledge(self, device: str, result: Offer | Report, refusal: str | None) -> None:
        """Send the receipt for a result: accepted, or refused with a reason."""
        receipt = Receipt(
            run=result.run,
            round=result.round,
            attempt=result.attempt,
            kind="train" if isinstance(result, Offer) else "evaluate",
            accepted=refusal is None,
            reason=(refusal or "")[:500],
            blob=result.blob.hash if isinstance(result, Offer) else None,
        )
        self.desk.tell(device, receipt)
