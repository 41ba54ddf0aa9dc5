"""MQTT for real: a mosquitto of version 5, an embedded broker of 3.1.1, and brokers that misbehave."""

import queue
import shutil
import socket
import struct
import subprocess
import threading

import pytest
from waiting import until

from edge_sdk.errors import BrokerError, ProtocolError
from edge_sdk.link import Link
from edge_sdk.protocol import Chunk, Topics, encode_chunk, reference
from edge_sdk.protocol.messages import Finished, encode
from edge_sdk.transport import (
    Connected,
    Credentials,
    Disconnected,
    MemoryBroker,
    MqttTransport,
    Received,
    Will,
)
from edge_simulation.broker import EmbeddedBroker, MosquittoBroker


@pytest.fixture(scope="module")
def mosquitto():
    with MosquittoBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def embedded():
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture(params=["mosquitto", "embedded", "memory"])
def connect(request):
    """Makes connected transports of one broker."""
    opened = []
    if request.param == "memory":
        memory = MemoryBroker()
        make = memory.transport
    else:
        broker = request.getfixturevalue(request.param)
        make = lambda: MqttTransport(broker.url)  # noqa: E731

    def connected(will=None):
        transport = make()
        transport.connect(will, timeout=10)
        opened.append(transport)
        assert wait_for(transport, Connected) == Connected()
        return transport

    yield connected
    for transport in opened:
        transport.close()


def wait_for(transport, kind, seconds=20.0):
    def next_of_kind():
        event = transport.receive(0.2)
        return event if isinstance(event, kind) else None

    return until(next_of_kind, seconds, kind.__name__)


def subscribed(transport, topic):
    """Subscribe, and wait until the broker has done so."""
    transport.subscribe(topic)
    transport.subscribe("probe/+")
    transport.publish("probe/1", b"there")
    until(lambda: wait_for(transport, Received).topic == "probe/1")
    transport.unsubscribe("probe/+")


def test_a_message_reaches_who_subscribes(connect):
    sender, receiver = connect(), connect()
    subscribed(receiver, "a/+/c")
    sender.publish("a/b/c", b"\x00payload\xff")
    assert wait_for(receiver, Received) == Received("a/b/c", b"\x00payload\xff")


def test_messages_of_one_sender_keep_their_order(connect):
    sender, receiver = connect(), connect()
    subscribed(receiver, "order")
    for number in range(300):
        sender.publish("order", str(number).encode())
    assert [int(wait_for(receiver, Received).payload) for _ in range(300)] == list(range(300))


def test_a_retained_message_reaches_who_comes_later(connect):
    sender = connect()
    sender.publish("kept/1", b"model", retain=True)
    late = connect()
    late.subscribe("kept/+")
    assert wait_for(late, Received) == Received("kept/1", b"model")
    sender.publish("kept/1", b"", retain=True)


def test_a_message_is_said_to_be_retained_by_who_comes_later_only(connect):
    sender, early = connect(), connect()
    subscribed(early, "said/+")
    sender.publish("said/1", b"model", retain=True)
    assert not wait_for(early, Received).retained
    late = connect()
    late.subscribe("said/+")
    assert wait_for(late, Received).retained
    sender.publish("said/1", b"", retain=True)


def test_a_device_hears_no_message_that_was_retained_for_it_but_takes_the_model():
    broker, topics = MemoryBroker(), Topics("f")
    other = broker.transport()
    other.connect(None, timeout=1)
    ref = reference(b"model", chunk=1024)
    other.publish(topics.down("d", "finished"), encode(Finished(run="0" * 32, model=ref)), retain=True)
    other.publish(topics.chunk(ref.hash, 0), encode_chunk(ref, b"model", 0), retain=True)
    link = Link(broker.transport(), topics, "d")
    link.open(timeout=1)
    link.subscribe_block(ref.hash, 0)
    heard = [link.receive(0) for _ in range(3)]
    assert [type(event) for event in heard if event is not None] == [Connected, Chunk]


def test_a_retained_message_that_was_cleared_reaches_nobody(connect):
    sender = connect()
    sender.subscribe("gone/2")
    sender.publish("gone/1", b"model", retain=True)
    sender.publish("gone/1", b"", retain=True)
    sender.publish("gone/2", b"end", retain=True)
    wait_for(sender, Received)  # the broker has had all three
    late = connect()
    late.subscribe("gone/+")
    assert wait_for(late, Received) == Received("gone/2", b"end")
    sender.publish("gone/2", b"", retain=True)


def test_nothing_comes_after_unsubscribing(connect):
    peer = connect()
    subscribed(peer, "left")
    peer.unsubscribe("left")
    subscribed(peer, "right")
    peer.publish("left", b"1")
    peer.publish("right", b"2")
    assert wait_for(peer, Received) == Received("right", b"2")


def test_a_message_over_the_limit_is_refused_before_it_is_sent(connect):
    peer = connect()
    subscribed(peer, "big")
    with pytest.raises(ProtocolError, match="over the limit"):
        peer.publish("big", bytes(peer.max_payload + 1))
    peer.publish("big", b"small")
    assert wait_for(peer, Received).payload == b"small"


def test_a_message_of_a_chunks_size_arrives_whole(connect):
    peer = connect()
    subscribed(peer, "chunk")
    payload = bytes(range(256)) * 480
    peer.publish("chunk", payload)
    assert wait_for(peer, Received).payload == payload


def test_a_goodbye_publishes_no_will(connect):
    watcher = connect()
    subscribed(watcher, "end/+")
    leaver = connect(lambda: Will("end/will", b"w"))
    leaver.publish("end/goodbye", b"g")
    leaver.close()
    connect().publish("end/last", b"l")
    assert [wait_for(watcher, Received).payload for _ in range(2)] == [b"g", b"l"]


@pytest.mark.parametrize(("name", "version"), [("mosquitto", 5), ("embedded", 4)])
def test_the_newest_version_that_the_broker_has_is_spoken(request, name, version):
    transport = MqttTransport(request.getfixturevalue(name).url)
    transport.connect(None, timeout=10)
    assert transport._version == version
    transport.close()


class Cut:
    """A relay before a broker whose connections can be cut, as a network does."""

    def __init__(self, port):
        self._port, self._sockets = port, []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [near, far]
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            return

    def cut(self):
        sockets, self._sockets = self._sockets, []
        for end in sockets:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RDWR) if end.fileno() >= 0 else None
            end.close()

    def close(self):
        self._server.close()


def test_a_will_carries_the_nonce_of_its_connection(mosquitto):
    nonces = queue.Queue()

    def will():
        nonces.put(len(made))
        made.append(f"nonce {len(made)}".encode())
        return Will("wills/d", made[-1])

    made = []
    relay = Cut(mosquitto.port)
    watcher, device = MqttTransport(mosquitto.url), MqttTransport(relay.url)
    watcher.connect(None, timeout=10)
    subscribed(watcher, "wills/+")
    device.connect(will, timeout=10)
    wills = []
    for _ in range(3):
        wait_for(device, Connected)
        wills.append(made[-1])
        relay.cut()
        assert wait_for(watcher, Received).payload == wills[-1]
    assert len(set(wills)) == 3
    device.close()
    watcher.close()
    relay.close()


def test_a_broker_that_restarts_is_found_again_with_its_subscriptions(mosquitto):
    with MosquittoBroker() as broker:
        first, second = MqttTransport(broker.url), MqttTransport(broker.url)
        for peer in (first, second):
            peer.connect(None, timeout=10)
            wait_for(peer, Connected)
        subscribed(first, "again")
        broker.stop(kill=True)
        for peer in (first, second):
            assert not wait_for(peer, Disconnected).fatal
        broker.start()
        for peer in (first, second):
            wait_for(peer, Connected)
        second.publish("again", b"here")
        assert wait_for(first, Received) == Received("again", b"here")
        first.close()
        second.close()


def test_what_is_published_while_the_connection_is_lost_is_dropped_and_does_not_block():
    with MosquittoBroker() as broker:
        peer = MqttTransport(broker.url)
        peer.connect(None, timeout=10)
        subscribed(peer, "topic")
        broker.stop(kill=True)
        wait_for(peer, Disconnected)
        for _ in range(1000):
            peer.publish("topic", b"old")
        broker.start()
        wait_for(peer, Connected)
        peer.publish("topic", b"new")
        assert wait_for(peer, Received).payload == b"new"
        peer.close()


def test_a_broker_that_hangs_up_on_version_5_is_spoken_to_in_3_1_1():
    versions = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        for _ in range(2):
            connection, _ = server.accept()
            with connection:
                packet = connection.recv(1 << 12)
                # Fixed header of two bytes, then the protocol's name "MQTT" and its level.
                versions.append(packet[8])
                if versions[-1] == 4:
                    connection.sendall(b"\x20\x02\x00\x00")
                    connection.recv(1 << 12)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    transport = MqttTransport(f"mqtt://127.0.0.1:{server.getsockname()[1]}")
    transport.connect(None, timeout=10)
    assert versions == [5, 4]
    transport.close()
    thread.join(10)
    server.close()


def test_something_that_never_answers_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as server:
        transport = MqttTransport(f"mqtt://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(BrokerError, match="no CONNACK"):
            transport.connect(None, timeout=2)


def test_a_broker_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(BrokerError, match=rf"no broker at 127\.0\.0\.1:{port} .*is it running"):
        MqttTransport(f"mqtt://127.0.0.1:{port}").connect(None, timeout=5)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "256.256.256.256"])
def test_a_host_that_does_not_exist_is_named(host):
    with pytest.raises(BrokerError, match=host):
        MqttTransport(f"mqtt://{host}").connect(None, timeout=5)


@pytest.mark.parametrize(
    "url",
    ["localhost", "http://h", "mqtt://", "mqtt://h:99999", "mqtt://h:x", "mqtt:///h", "", "mqtt://[::1"],
)
def test_what_is_no_url_of_a_broker_is_refused(url):
    with pytest.raises(BrokerError):
        MqttTransport(url)


def test_a_missing_certificate_authority_is_refused_at_once(tmp_path):
    with pytest.raises(BrokerError, match="--ca"):
        MqttTransport("mqtts://h", credentials=Credentials(ca=tmp_path / "none.pem"))


def test_a_transport_that_is_not_connected_says_so():
    with pytest.raises(BrokerError, match="not connected"):
        MqttTransport("mqtt://h").publish("t", b"")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A mosquitto with one login: device, secret."""
    tool = shutil.which("mosquitto_passwd")
    assert tool, "mosquitto_passwd is not installed: apt-get install mosquitto"
    passwords = tmp_path_factory.mktemp("guarded") / "passwords"
    subprocess.run([tool, "-b", "-c", passwords, "device", "secret"], check=True, capture_output=True)
    with MosquittoBroker(extra_config=f"allow_anonymous false\npassword_file {passwords}") as broker:
        yield broker


def test_a_right_password_opens(guarded):
    transport = MqttTransport(guarded.url, credentials=Credentials(username="device", password="secret"))
    transport.connect(None, timeout=10)
    transport.close()


def test_a_password_in_the_url_opens(guarded):
    transport = MqttTransport(f"mqtt://device:secret@127.0.0.1:{guarded.port}")
    transport.connect(None, timeout=10)
    transport.close()


@pytest.mark.parametrize(
    "credentials", [Credentials(username="device", password="wrong"), Credentials(username="x"), None]
)
def test_a_wrong_login_is_refused_with_the_brokers_reason(guarded, credentials):
    with pytest.raises(BrokerError, match=r"refuses the connection: .*[Nn]ot authori"):
        MqttTransport(guarded.url, credentials=credentials).connect(None, timeout=10)


def test_a_smaller_limit_of_the_broker_wins():
    with MosquittoBroker(extra_config="max_packet_size 20000") as broker:
        transport = MqttTransport(broker.url)
        transport.connect(None, timeout=10)
        with pytest.raises(ProtocolError, match="over the limit"):
            transport.publish("t", bytes(20_000))
        transport.close()
