"""Blobs by retained chunks where the broker keeps them, else by asking: in turn, and bounded."""

import pytest
from fleets import Fleet, Probe
from quadrants import quadrants

from edge_sdk.protocol import Topics, decode_chunk, encode_chunk
from edge_sdk.protocol.messages import Grant, Join, encode
from edge_sdk.transport import MemoryBroker
from edge_server.desk import Desk
from edge_server.publication import ASKED_AT_ONCE, BURST, MOST_ASKING, RATE, Publication

CHUNK = 1024
TOPICS = Topics("f")
BLOB = bytes(range(256)) * 4 * 100


class Wire:
    """A publication and all that it sends to devices, as (device, index of the chunk)."""

    def __init__(self, broker=None, **options):
        self.broker = broker or MemoryBroker()
        self.transport = self.broker.transport()
        self.transport.connect(None, timeout=1)
        self.publication = Publication(self.transport, TOPICS, chunk=CHUNK, **options)
        self.probe = Probe(self.broker, "edge/v1/f/down/#")
        self.ref = self.publication.announce(BLOB)

    def ask(self, device, start, stop, now=0.0):
        self.publication.serve(device, Grant(blob=self.ref.hash, start=start, stop=stop), now)

    @property
    def sent(self):
        return [(TOPICS.parse(e.topic).device, decode_chunk(e.payload).index) for e in self.probe.messages()]


@pytest.fixture
def wire():
    return Wire()


def exhausted(wire):
    """The wire after all that may be sent at once has been sent."""
    for number in range(BURST):
        wire.ask(f"early-{number}", 0, 1)
    assert len(wire.sent) == BURST
    return wire


def later(wire, chunks, now=0.0):
    """Chunks that are sent when there is time for so many, as pairs."""
    before = len(wire.sent)
    wire.publication.tick(now + chunks / RATE)
    return wire.sent[before:]


def test_a_device_gets_the_chunks_that_it_asks_for(wire):
    wire.ask("a", 3, 6)
    assert wire.sent == [("a", 3), ("a", 4), ("a", 5)]


def test_the_last_chunks_are_sent_and_none_beyond(wire):
    wire.ask("a", 98, 140)
    assert wire.sent == [("a", 98), ("a", 99)]


def test_one_grant_is_worth_no_more_than_its_most_chunks(wire):
    wire.ask("a", 0, 100)
    assert len(wire.sent) == ASKED_AT_ONCE


def test_nobody_gets_a_blob_that_is_not_out(wire):
    wire.publication.serve("a", Grant(blob="0" * 64, start=0, stop=9), 0.0)
    assert wire.sent == []
    assert not wire.publication.waiting


def test_devices_take_turns(wire):
    exhausted(wire)
    wire.ask("greedy", 0, 32)
    wire.ask("a", 7, 8)
    wire.ask("b", 8, 9)
    assert later(wire, 4) == [("greedy", 0), ("a", 7), ("b", 8), ("greedy", 1)]


def test_a_flood_of_grants_costs_no_more_than_the_rate(wire):
    exhausted(wire)
    for _ in range(1000):
        wire.ask("flood", 0, 32)
    assert len(later(wire, 10)) == 10


def test_a_flood_from_many_ids_is_bounded(wire):
    exhausted(wire)
    for number in range(MOST_ASKING + 5):
        wire.ask(f"id-{number}", 0, 1)
    wire.ask("late", 0, 1)
    assert ("late", 0) not in later(wire, BURST)
    assert len(wire.publication._asked) <= MOST_ASKING


def test_what_is_asked_twice_while_it_waits_is_sent_once(wire):
    exhausted(wire)
    wire.ask("a", 0, 4)
    wire.ask("a", 0, 4)
    assert later(wire, 100) == [("a", index) for index in range(4)]


def test_a_grant_that_follows_on_another_adds_to_it(wire):
    exhausted(wire)
    wire.ask("a", 0, 4)
    wire.ask("a", 4, 8)
    assert later(wire, 100) == [("a", index) for index in range(8)]


def test_a_grant_elsewhere_takes_the_place_of_the_one_that_waits(wire):
    exhausted(wire)
    wire.ask("a", 0, 4)
    wire.ask("a", 50, 52)
    assert later(wire, 100) == [("a", 50), ("a", 51)]


def test_a_blob_that_is_withdrawn_is_not_sent_any_more(wire):
    exhausted(wire)
    wire.ask("a", 0, 4)
    wire.publication.withdraw(wire.ref)
    assert later(wire, 100) == []
    assert not wire.publication.waiting


def test_a_device_that_is_not_known_gets_nothing():
    wire = Wire(known={"a"}.__contains__)
    wire.ask("stranger", 0, 4)
    wire.ask("a", 0, 1)
    assert wire.sent == [("a", 0)]


def test_nothing_is_sent_while_it_would_have_to_wait_for_the_broker():
    class Full:
        room = 0
        can_retain = True

        def publish(self, *_args, **_options):
            raise AssertionError("it would wait")

    publication = Publication(Full(), TOPICS, chunk=CHUNK)
    ref = publication.announce(BLOB)
    publication.serve("a", Grant(blob=ref.hash, start=0, stop=9), 0.0)
    publication.tick(60.0)
    assert publication.waiting


def test_chunks_are_those_of_the_blob(wire):
    wire.ask("a", 2, 3)
    assert wire.probe.messages()[0].payload == encode_chunk(wire.ref, BLOB, 2)


def test_a_broker_that_retains_is_given_every_chunk_once():
    wire = Wire()
    wire.publication.send_all()
    late = Probe(wire.broker, "edge/v1/f/model/#")
    assert sorted(decode_chunk(e.payload).index for e in late.messages()) == list(range(100))
    assert wire.ref.sources == ("retained", "ask")


def test_where_the_broker_does_not_retain_devices_are_told_to_ask():
    assert Wire(MemoryBroker(can_retain=False)).ref.sources == ("ask",)


def test_where_the_broker_does_not_retain_nothing_is_published():
    wire = Wire(MemoryBroker(can_retain=False))
    everything = Probe(wire.broker, "#")
    wire.publication.send_all()
    wire.publication.withdraw(wire.ref)
    assert everything.messages() == []


def test_a_run_ends_over_a_broker_that_does_not_retain(tmp_path, norm):
    with Fleet(tmp_path) as fleet:
        fleet.broker = MemoryBroker(can_retain=False)
        _, run = fleet.serve(norm)
        device = fleet.device("d", quadrants(20))
        assert run.result().finished
        device.result()


def desk_and_peer():
    broker = MemoryBroker()
    desk = Desk(broker.transport(), TOPICS)
    peer = broker.transport()
    peer.connect(None, timeout=1)
    return desk, peer


def join():
    return Join(sdk="0", install="0" * 32, boot="0" * 16, nonce="0" * 16, examples=1)


def next_message(desk):
    while (event := desk.receive(0)) is not None:
        if isinstance(event, tuple):
            return event
    return None


def test_a_message_that_the_broker_has_retained_is_not_heard():
    desk, peer = desk_and_peer()
    peer.publish(TOPICS.up("ghost", "join"), encode(join()), retain=True)
    desk.open(timeout=1)
    assert next_message(desk) is None


def test_a_message_of_now_is_heard_although_it_is_retained_too():
    desk, peer = desk_and_peer()
    desk.open(timeout=1)
    peer.publish(TOPICS.up("d", "join"), encode(join()), retain=True)
    assert next_message(desk) == ("d", join())
