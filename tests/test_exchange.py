"""A device's transfers against a broker and a server that are played by the test."""

import random
import tracemalloc

import pytest

from edge_sdk import exchange
from edge_sdk.errors import ProtocolError
from edge_sdk.exchange import ANSWERS, Exchange
from edge_sdk.partial import Partial
from edge_sdk.protocol import Chunk, chunk_count, reference
from edge_sdk.protocol.messages import Grant
from edge_sdk.protocol.topics import BLOCK

DATA = random.Random(0).randbytes(600_000)
REF = reference(DATA, chunk=1024)


class Wire:
    """Gives what is retained on a subscription and what the server has on a grant, at once."""

    def __init__(self, retained=(), server=DATA):
        self._retained, self._server = dict(retained), server
        self.blocks, self.granted = [], []
        self.exchange = Exchange(self)

    def subscribe_block(self, blob, block):
        self.blocks.append(block)
        for index in range(block * BLOCK, (block + 1) * BLOCK):
            if index in self._retained:
                self.exchange.feed_chunk(Chunk(blob, index, self._retained[index]))

    def unsubscribe_block(self, blob, block):
        pass

    def send(self, grant):
        self.granted += range(grant.start, grant.stop)
        for index in range(grant.start, grant.stop):
            self.exchange.feed_chunk(
                Chunk(grant.blob, index, self._server[index * 1024 : (index + 1) * 1024])
            )

    def fetch(self, **storage):
        return self.exchange.fetch(REF, limit=len(DATA), cancelled=lambda: False, **storage)


def all_retained():
    return {index: DATA[index * 1024 : (index + 1) * 1024] for index in range(chunk_count(REF))}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(exchange, "STALL", 0.05)


def test_all_that_is_retained_is_not_asked_for():
    wire = Wire(all_retained())
    assert wire.fetch() == DATA
    assert (wire.blocks, wire.granted) == ([0, 1, 2], [])


def test_where_nothing_is_retained_one_block_is_waited_for():
    wire = Wire()
    assert wire.fetch() == DATA
    assert (wire.blocks, wire.granted) == ([0], list(range(chunk_count(REF))))


def test_a_hole_in_what_is_retained_is_asked_for():
    retained = all_retained()
    del retained[300]
    wire = Wire(retained)
    assert wire.fetch() == DATA
    assert (wire.blocks, wire.granted) == ([0, 1, 2], [300])


def test_a_retained_chunk_that_is_another_is_got_over_by_asking_for_all():
    wire = Wire({**all_retained(), 5: bytes(1024)})
    assert wire.fetch() == DATA
    assert wire.granted == list(range(chunk_count(REF)))


def test_a_server_that_gives_another_blob_is_told_so_after_one_repeat():
    wire = Wire(server=bytes(len(DATA)))
    with pytest.raises(ProtocolError, match="SHA-256 differs"):
        wire.fetch()
    assert len(wire.granted) == 2 * chunk_count(REF)


def test_what_is_on_disk_is_neither_asked_for_nor_sent_again(tmp_path):
    kept = Partial(tmp_path, REF)
    for index in (*range(100), *range(256, 270)):
        kept.put(index, DATA[index * 1024 : (index + 1) * 1024])
    kept.close()
    wire = Wire(all_retained())
    assert wire.fetch(storage=Partial(tmp_path, REF)) == DATA
    # Of a block that is there in part the broker would send the whole.
    assert (wire.blocks, wire.granted) == ([2], [*range(100, 256), *range(270, 512)])


def test_a_flood_of_answers_costs_no_memory():
    waiting = Exchange(None)
    tracemalloc.start()
    try:
        for number in range(200 * ANSWERS):
            waiting.feed_answer(Grant(blob="0" * 64, start=number, stop=number + 1))
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
