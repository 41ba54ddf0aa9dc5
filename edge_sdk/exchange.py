"""Blobs to and from one device: download by blocks or by asking, upload by the server's grants.

A worker calls :meth:`Exchange.fetch` and :meth:`Exchange.deliver`, which wait; the client's event loop
feeds what arrives. Every wait ends: with success, a deadline, or a cancellation.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable

from edge_sdk.errors import BrokerError, ProtocolError
from edge_sdk.examples import Cancelled
from edge_sdk.link import Link
from edge_sdk.protocol import Chunk, Incoming, chunk_count
from edge_sdk.protocol.messages import Grant, Offer, Receipt, Ref, Report
from edge_sdk.protocol.topics import BLOCK
from edge_sdk.protocol.transfer import Storage

logger = logging.getLogger(__name__)

ANSWERS = 64
"""Grants and receipts that may wait for the worker; the server repeats those that find no room."""
WINDOW = 16
"""Chunks that one grant asks the server for."""
STALL = 6.0
"""Seconds without a new chunk after which it is asked for again."""
GIVE_UP = 60.0
"""Seconds without a new chunk after which a download fails."""
OFFER_EVERY = 4.0
"""Seconds after which an offer without an answer is repeated."""


class Exchange:
    """Transfers of one device over its link."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._chunks: queue.Queue[Chunk] = queue.Queue(2 * BLOCK)
        self._answers: queue.Queue[Grant | Receipt] = queue.Queue(ANSWERS)

    def feed_chunk(self, chunk: Chunk) -> None:
        """A chunk has arrived; it is dropped where nobody takes them, to be granted again if it is wanted."""
        with contextlib.suppress(queue.Full):
            self._chunks.put_nowait(chunk)

    def feed_answer(self, answer: Grant | Receipt) -> None:
        """The server has granted a range, or has given its receipt; dropped as :meth:`feed_chunk` does."""
        with contextlib.suppress(queue.Full):
            self._answers.put_nowait(answer)

    def fetch(
        self, ref: Ref, *, limit: int, cancelled: Callable[[], bool], storage: Storage | None = None
    ) -> bytes:
        """Download a blob: its retained blocks first, then what is missing from the server itself.

        Args:
            ref: hash, size and sources.
            limit: largest size in bytes that is accepted.
            cancelled: asked several times a second.
            storage: keeps chunks over restarts, and has what an earlier download has left.

        Raises:
            ProtocolError: the blob is over the limit or not the one announced.
            BrokerError: nothing has arrived for 60 s.
            Cancelled: ``cancelled()`` became true.
        """
        incoming = Incoming(ref, limit=limit, storage=storage)
        _drain(self._chunks)
        if "retained" in ref.sources:
            self._take_retained(incoming, cancelled)
        self._ask(incoming, cancelled)
        try:
            return incoming.finish()
        except ProtocolError:
            # What is retained, or was kept from before, may be wrong: the server's own word counts.
            logger.warning("the blob %s has come damaged: asking the server for all of it", ref.hash[:12])
            _drain(self._chunks)
            self._ask(incoming, cancelled)
            return incoming.finish()

    def deliver(
        self, result: Offer | Report, data: bytes, *, timeout: float, cancelled: Callable[[], bool]
    ) -> Receipt:
        """Hand in a result until the server's receipt has come; it is repeated as long as none has.

        Args:
            result: an update's offer, or an evaluation's report.
            data: the update, of which the server grants ranges; empty for a report.
            timeout: seconds without any answer after which this fails.
            cancelled: asked several times a second.

        Raises:
            BrokerError: the server has not answered for ``timeout`` seconds.
            Cancelled: ``cancelled()`` became true.
        """
        _drain(self._answers)
        self._link.send(result)
        offered = answered = time.monotonic()
        while not cancelled():
            try:
                answer = self._answers.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() - answered > timeout:
                    raise BrokerError(f"the server has not answered for {timeout:.0f} s") from None
                if time.monotonic() - offered > OFFER_EVERY:
                    self._link.send(result)
                    offered = time.monotonic()
                continue
            offered = answered = time.monotonic()
            if isinstance(answer, Receipt):
                if answer.key == result.key:
                    return answer
            elif isinstance(result, Offer) and answer.blob == result.blob.hash:
                stop = min(answer.stop, answer.start + BLOCK, chunk_count(result.blob))
                self._link.send_chunks(result.blob, data, answer.start, stop)
        raise Cancelled

    def _take_retained(self, incoming: Incoming, cancelled: Callable[[], bool]) -> None:
        """Take the blocks of which nothing is there yet, until one gives nothing."""
        blob = incoming.ref.hash
        for block in range(-(-incoming.count // BLOCK)):
            span = (block * BLOCK, min((block + 1) * BLOCK, incoming.count))
            if incoming.began(*span):
                # The broker would send all of it again.
                continue
            self._link.subscribe_block(blob, block)
            try:
                if not self._collect(incoming, span, cancelled):
                    return
            finally:
                self._link.unsubscribe_block(blob, block)

    def _ask(self, incoming: Incoming, cancelled: Callable[[], bool]) -> None:
        """Have the server send what is missing."""
        blob, last = incoming.ref.hash, time.monotonic()
        while missing := incoming.next_range(WINDOW):
            self._link.send(Grant(blob=blob, start=missing[0], stop=missing[1]))
            if self._collect(incoming, missing, cancelled):
                last = time.monotonic()
            elif time.monotonic() - last > GIVE_UP:
                raise BrokerError(f"the model {blob[:12]} could not be fetched: nothing came for 60 s")

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
