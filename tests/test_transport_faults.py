"""Brokers that freeze, refuse, forget, hang up or talk nonsense: the transport goes on and says why."""

import contextlib
import logging
import random
import signal
import struct
import threading

import pytest
from fake_broker import PUBACK, FakeBroker, packet
from fleets import Thread
from quadrants import quadrants
from waiting import until

from edge_sdk import EdgeClient, Engine
from edge_sdk.errors import BrokerError
from edge_sdk.transport import Connected, Disconnected, MqttTransport, Received, Will
from edge_sdk.transport.inbox import Inbox
from edge_sdk.transport.mqtt import MAX_OUTSTANDING, MAX_PAYLOAD
from edge_sdk.transport.pauses import FIRST, LONGEST, STEADY, Pauses
from edge_server import RunConfig, Server
from edge_simulation.broker import MosquittoBroker

RECEIVE_MAXIMUM, RETAIN_AVAILABLE, MAXIMUM_PACKET_SIZE = b"\x21", b"\x25", b"\x27"
UNSUPPORTED_VERSION, NOT_AUTHORISED, QUOTA = 0x84, 0x87, 0x97


@pytest.fixture
def transports():
    """Makes connected transports of a broker's, and closes them."""
    opened = []

    def connected(broker, will=None, **options):
        transport = MqttTransport(broker.url, **options)
        opened.append(transport)
        transport.connect(will, timeout=10)
        assert transport.receive(5) == Connected()
        return transport

    yield connected
    for transport in opened:
        transport.close()


def wait_for(transport, kind, seconds=30.0):
    def following():
        event = transport.receive(0.2)
        return event if isinstance(event, kind) else None

    return until(following, seconds, kind.__name__)


def echoed(transport, topic="echo"):
    """A message of one's own has come back: the connection carries both ways."""

    def back():
        transport.publish(topic, b"there")
        event = transport.receive(0.5)
        return isinstance(event, Received) and event.topic == topic

    transport.subscribe(topic)
    return until(back)


def test_a_frozen_broker_is_left_and_found_again(transports):
    with MosquittoBroker() as broker:
        peer = transports(broker, patience=0.5)
        broker._process.send_signal(signal.SIGSTOP)
        for _ in range(MAX_OUTSTANDING + 50):
            peer.publish("topic", bytes(1000))
        assert "acknowledges nothing" in wait_for(peer, Disconnected).reason
        broker._process.send_signal(signal.SIGCONT)
        wait_for(peer, Connected)
        assert echoed(peer)


def test_a_broker_that_does_not_answer_holds_up_no_close(transports):
    with FakeBroker(acknowledges=False) as broker:
        peer = transports(broker)
        peer.publish("topic", b"")
        Thread(peer.close).result(20)


def test_what_was_outstanding_when_the_connection_was_lost_is_not_sent_again(transports):
    with FakeBroker(acknowledges=False) as broker:
        peer = transports(broker)
        for _ in range(100):
            peer.publish("topic", b"old")
        until(lambda: broker.published)
        broker.cut()
        wait_for(peer, Connected)
        peer.publish("topic", b"new")
        until(lambda: broker.published[-1][2] == b"new")
        assert [p for connection, _, p in broker.published if connection == 2] == [b"new"]


def test_every_connection_starts_a_clean_session_of_its_own(transports):
    with FakeBroker() as broker:
        peer = transports(broker)
        broker.cut()
        wait_for(peer, Connected)
        assert all(connect[7] & 2 for connect in broker.connects)
        assert len(set(broker.connects)) == 2


def test_no_more_is_in_flight_than_the_broker_takes(transports):
    with FakeBroker(acknowledges=False, properties=RECEIVE_MAXIMUM + struct.pack("!H", 3)) as broker:
        peer = transports(broker, patience=60.0)
        sender = Thread(lambda: [peer.publish("topic", b"") for _ in range(5)])
        until(lambda: len(broker.published) == 3)
        sender.join(0.5)
        assert len(broker.published) == 3
        broker.acknowledges = True
        for mid in (1, 2, 3):
            broker.send(packet(PUBACK, struct.pack("!H", mid)))
        sender.result()
        until(lambda: len(broker.published) == 5)


def test_a_will_is_asked_for_at_every_attempt(transports):
    made = []

    def will():
        made.append(f"nonce {len(made)}".encode())
        return Will("will", made[-1])

    with FakeBroker() as broker:
        peer = transports(broker, will)
        broker.answers = [QUOTA - 1]  # quota is a reason for a longer pause, another code is not
        broker.cut()
        wait_for(peer, Connected)
        assert len(set(made)) == 3
        assert made[-1] in broker.connects[-1]


def test_a_login_that_is_refused_later_is_the_end(transports):
    with FakeBroker() as broker:
        peer = transports(broker)
        broker.answers = [NOT_AUTHORISED] * 9
        broker.cut()
        assert not wait_for(peer, Disconnected).fatal
        event = wait_for(peer, Disconnected)
        assert event.fatal
        assert "Not authorized" in event.reason
        peer.publish("topic", b"dropped")
        assert peer.receive(0.5) is None


def test_a_broker_that_comes_back_without_version_5_is_spoken_to_in_3_1_1(transports):
    with FakeBroker() as broker:
        peer = transports(broker)
        broker.answers = [UNSUPPORTED_VERSION]
        broker.cut()
        wait_for(peer, Connected)
        assert broker.connects[-1][6] == 4


def test_a_topic_that_is_not_utf_8_does_no_harm(transports):
    with FakeBroker() as broker:
        peer = transports(broker)
        broker.publish(b"\xff\xfe", b"1")
        broker.publish(b"good", b"2")
        assert peer.receive(5) == Received("good", b"2")


@pytest.mark.parametrize(
    "nonsense", [b"\x40\x00", b"\x30\x01\xff", b"\xf0\x00", b"\x90\x00", b"\x32\xff\xff\xff\xff\x7f"]
)
def test_bytes_that_are_no_mqtt_end_the_connection_and_not_the_transport(transports, nonsense):
    with FakeBroker() as broker:
        peer = transports(broker)

        def ended():
            with contextlib.suppress(OSError):
                broker.send(nonsense)
            return isinstance(peer.receive(0.5), Disconnected)

        until(ended)
        wait_for(peer, Connected)
        peer.publish("topic", b"on")
        until(lambda: broker.published)


def test_an_error_in_the_will_is_reported_and_tried_again(transports):
    calls = []

    def will():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no nonce")
        return Will("will", b"")

    with FakeBroker() as broker:
        peer = transports(broker, will)
        broker.cut()
        wait_for(peer, Disconnected)
        assert "no nonce" in wait_for(peer, Disconnected).reason
        wait_for(peer, Connected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_network_thread_that_dies_is_started_anew(transports):
    calls = []

    def will():
        calls.append(1)
        if len(calls) == 2:
            raise SystemExit
        return Will("will", b"")

    with FakeBroker() as broker:
        peer = transports(broker, will)
        broker.cut()
        reasons = {wait_for(peer, Disconnected).reason for _ in range(2)}
        assert "the network thread has died" in reasons
        wait_for(peer, Connected)


def test_a_broker_that_hangs_up_on_large_messages_is_found_out(transports):
    with FakeBroker(levels=(4,), largest=50_000) as broker:
        peer = transports(broker)
        for _ in range(20):
            peer.publish("large", bytes(20_000))
        until(lambda: len(broker.published) == 20)
        reasons = []
        for _ in range(3):
            peer.publish("large", bytes(60_000))
            reasons.append(wait_for(peer, Disconnected).reason)
            wait_for(peer, Connected)
        assert "less than 60005 bytes: set chunk_bytes lower" in reasons[-1]
        assert not any("chunk_bytes" in reason for reason in reasons[:-1])


def test_a_disconnect_for_a_packet_too_large_names_the_fix(transports):
    with FakeBroker() as broker:
        peer = transports(broker)
        broker.send(b"\xe0\x01\x95")
        assert "set chunk_bytes lower" in wait_for(peer, Disconnected).reason


def test_the_broker_is_told_the_largest_packet(transports):
    with FakeBroker() as broker:
        transports(broker)
        assert MAXIMUM_PACKET_SIZE + struct.pack("!I", MAX_PAYLOAD + 512) in broker.connects[0]


def test_a_message_over_the_limit_is_not_taken_in(transports):
    with FakeBroker() as broker:
        peer = transports(broker)
        broker.publish(b"large", bytes(MAX_PAYLOAD + 1))
        broker.publish(b"small", b"2")
        assert peer.receive(5) == Received("small", b"2")


@pytest.mark.parametrize(("code", "cause"), [(NOT_AUTHORISED, "ACL"), (QUOTA, "quota")])
def test_messages_that_the_broker_refuses_are_reported_once_with_the_cause(transports, caplog, code, cause):
    with FakeBroker(puback=code) as broker, caplog.at_level(logging.WARNING, "edge_sdk"):
        peer = transports(broker)
        for _ in range(5):
            peer.publish("up/a/join", b"")
        peer.close()
        told = [r.getMessage() for r in caplog.records if "up/a/join" in r.getMessage()]
        assert len(told) == 1
        assert cause in told[0]
        assert "refused 5 messages" in caplog.text


def test_a_subscription_that_the_broker_refuses_is_reported(transports, caplog):
    with FakeBroker(suback=NOT_AUTHORISED) as broker, caplog.at_level(logging.WARNING, "edge_sdk"):
        transports(broker).subscribe("down/a/+")
        assert until(
            lambda: [r for r in caplog.records if "down/a/+" in r.getMessage() and "ACL" in r.getMessage()]
        )


def test_a_transport_is_used_twice_and_nothing_is_left_of_before(transports):
    with FakeBroker(acknowledges=False) as broker:
        peer = transports(broker)
        for _ in range(MAX_OUTSTANDING):
            peer.publish("topic", b"")
        peer.subscribe("before")
        broker.publish(b"before", b"stale")
        broker.cut()
        peer.close()
        broker.acknowledges = True
        peer.connect(None, timeout=10)
        assert peer.receive(5) == Connected()
        assert peer.room == MAX_OUTSTANDING
        peer.publish("topic", b"on")
        until(lambda: broker.published and broker.published[-1][2] == b"on")
        assert peer.receive(0.2) is None


def test_a_transport_that_is_closed_says_so(transports):
    with FakeBroker() as broker:
        peer = transports(broker)
        peer.close()
        with pytest.raises(BrokerError, match="not connected"):
            peer.publish("topic", b"")


def test_threads_end_with_the_transport(transports):
    before = set(threading.enumerate())
    with FakeBroker() as broker:
        transports(broker).close()
        assert not [t for t in set(threading.enumerate()) - before if t.name == "edge-mqtt"]


# A broker that keeps no retained messages.


@pytest.fixture(scope="module")
def forgetful():
    with MosquittoBroker(extra_config="retain_available false") as broker:
        yield broker


def test_a_broker_that_does_not_retain_is_known(transports, forgetful):
    assert not transports(forgetful).can_retain


def test_a_retained_message_is_not_sent_where_it_would_end_the_connection(transports, forgetful):
    peer = transports(forgetful)
    peer.publish("model", b"chunk", retain=True)
    peer.subscribe("end")
    peer.publish("end", b"here")
    assert peer.receive(5) == Received("end", b"here")


def test_a_run_ends_over_a_broker_that_does_not_retain(tmp_path, forgetful, norm):
    least = {"rounds": 1, "participants": 1, "lr": 0.1, "batch_size": 8, "evaluation": "none"}
    server = Server(norm, RunConfig(fleet="f", **least), broker=forgetful.url, work_dir=tmp_path / "server")
    run = Thread(server.run)
    client = EdgeClient(
        forgetful.url,
        fleet="f",
        data=quadrants(20),
        work_dir=tmp_path / "device",
        device_id="d",
        engine=Engine(threads=1),
    )
    device = Thread(client.run)
    assert run.result().finished
    device.result()


# What waits, and how long.


def filled(inbox, count, size):
    for number in range(count):
        inbox.put(Received(f"{number:04}", bytes(size - 4)))
    return inbox


def emptied(inbox):
    events = []
    while (event := inbox.take(0)) is not None:
        events.append(event)
    return events


def test_no_more_bytes_wait_than_allowed():
    assert len(emptied(filled(Inbox(size=1000), 20, 100))) == 10


def test_no_more_messages_wait_than_allowed():
    assert len(emptied(filled(Inbox(messages=7), 20, 100))) == 7


def test_there_is_room_again_for_what_has_been_taken():
    inbox = filled(Inbox(size=1000), 20, 100)
    emptied(inbox)
    assert len(emptied(filled(inbox, 20, 100))) == 10


def test_a_lost_connection_is_reported_though_the_inbox_is_full():
    inbox = filled(Inbox(size=1000), 20, 100)
    inbox.put(Disconnected("cut"))
    assert emptied(inbox)[-1] == Disconnected("cut")


def test_pauses_are_bounded_and_double():
    pauses, bounds = Pauses(), []
    for _ in range(12):
        bounds.append(pauses.bound)
        assert 0 <= pauses.next() <= bounds[-1]
    assert bounds[:4] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert bounds[-1] == LONGEST


def test_a_fleet_comes_back_spread_over_the_whole_pause():
    random.seed(1)
    tenths = {int(Pauses().next() / FIRST * 10) for _ in range(200)}
    assert tenths == set(range(10))


def test_a_connection_that_ends_at_once_does_not_shorten_the_pauses():
    pauses = Pauses()
    for _ in range(5):
        pauses.next()
    pauses.held(STEADY / 2)
    assert pauses.bound > FIRST
    pauses.held(STEADY)
    assert pauses.bound == FIRST


def test_a_busy_broker_is_given_time_from_the_first():
    pauses = Pauses()
    pauses.busy()
    assert pauses.bound > 8 * FIRST
