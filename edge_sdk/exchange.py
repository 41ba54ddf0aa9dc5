"""Blobs to and from one device: download by blocks or by asking, upload by the server's grants.

A worker calls :meth:`Exchange.fetch` and :meth:`Exchange.deliver`, which wait; the client's event loop
feeds what arrives. Every wait ends: with success, a deadline, or a cancellation.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from edge_sdk.errors import BrokerError
from edge_sdk.link import Link
from edge_sdk.protocol import Chunk, Incoming
from edge_sdk.protocol.messages import Grant, Offer, Receipt, Ref
from edge_sdk.protocol.topics import BLOCK
from edge_sdk.training import Cancelled

WINDOW = 16
"""Chunks that one grant asks the server for."""
STALL = 3.0
"""Seconds without a new chunk after which it is asked for again."""
GIVE_UP = 60.0
"""Seconds without a new chunk after which a download fails."""
OFFER_EVERY = 4.0
"""Seconds after which an offer without an answer is repeated."""


class Exchange:
    """Transfers of one device over its link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._chunks: queue.Queue[Chunk] = queue.Queue()
        self._answers: queue.Queue[Grant | Receipt] = queue.Queue()

    def feed_chunk(self, chunk: Chunk) -> None:
        """A chunk has arrived."""
        self._chunks.put(chunk)

    def feed_answer(self, answer: Grant | Receipt) -> None:
        """The server has granted a range, or has given its receipt."""
        self._answers.put(answer)

    def fetch(self, ref: Ref, *, limit: int, cancelled: Callable[[], bool]) -> bytes:
        """Download a blob: its retained blocks first, then what is missing from the server itself.

        Args:
            ref: hash, size and sources.
            limit: largest size in bytes that is accepted.
            cancelled: asked several times a second.

        Raises:
            ProtocolError: the blob is over the limit or not the one announced.
            BrokerError: nothing has arrived for 60 s.
            Cancelled: ``cancelled()`` became true.
        """
        incoming = Incoming(ref, limit=limit)
        _drain(self._chunks)
        if "retained" in ref.sources:
            for block in range(-(-incoming.count // BLOCK)):
                span = (block * BLOCK, min((block + 1) * BLOCK, incoming.count))
                self._link.subscribe_block(ref.hash, block)
                try:
                    self._collect(incoming, span, cancelled)
                finally:
                    self._link.unsubscribe_block(ref.hash, block)
        last = time.monotonic()
        while span_or_none := incoming.next_range(WINDOW):
            self._link.send(Grant(blob=ref.hash, start=span_or_none[0], stop=span_or_none[1]))
            if self._collect(incoming, span_or_none, cancelled):
                last = time.monotonic()
            elif time.monotonic() - last > GIVE_UP:
                raise BrokerError(f"the model {ref.hash[:12]} could not be fetched: nothing came for 60 s")
        return incoming.finish()

    def deliver(self, offer: Offer, data: bytes, *, cancelled: Callable[[], bool]) -> Receipt:
        """Upload an update until the server's receipt has come; offered again as long as none has.

        Raises:
            Cancelled: ``cancelled()`` became true.
        """
        _drain(self._answers)
        self._link.send(offer)
        offered = time.monotonic()
        while not cancelled():
            try:
                answer = self._answers.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() - offered > OFFER_EVERY:
                    self._link.send(offer)
                    offered = time.monotonic()
                continue
            offered = time.monotonic()
            if isinstance(answer, Receipt):
                if (answer.run, answer.round, answer.attempt) == (offer.run, offer.round, offer.attempt):
                    return answer
            elif answer.blob == offer.blob.hash:
                count = -(-offer.blob.size // offer.blob.chunk)
                stop = min(answer.stop, answer.start + BLOCK, count)
                self._link.send_chunks(offer.blob, data, answer.start, stop)
        raise Cancelled

    def _collect(self, incoming: Incoming, span: tuple[int, int], cancelled: Callable[[], bool]) -> bool:
        """Take chunks until the span is there or none has come for STALL seconds; True if any was new."""
        progress, last = False, time.monotonic()
        while incoming.missing_in(*span):
            if cancelled():
                raise Cancelled
            try:
                fresh = incoming.add(self._chunks.get(timeout=0.2))
            except queue.Empty:
                fresh = False
            if fresh:
                progress, last = True, time.monotonic()
            elif time.monotonic() - last > STALL:
                break
        return progress


def _drain(stale: queue.Queue[Chunk] | queue.Queue[Grant | Receipt]) -> None:
    while not stale.empty():
        stale.get_nowait()
