"""The proxy between a real mosquitto and paho clients, or sockets where bytes are counted."""

import queue
import socket
import struct
import time

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from waiting import until

from edge_simulation.broker import MosquittoBroker
from edge_simulation.proxy import Proxy, Rates

V311, V5 = mqtt.MQTTv311, mqtt.MQTTv5


@pytest.fixture(scope="module")
def mosquitto():
    with MosquittoBroker() as broker:
        yield broker


@pytest.fixture
def proxy(mosquitto):
    with Proxy(mosquitto.url, seed=3) as made:
        yield made


class Peer:
    """A paho client that keeps what happens to it."""

    def __init__(self, port, name, version=V311, topic=None):
        self.got, self.lost, self.acknowledged = queue.Queue(), queue.Queue(), queue.Queue()
        subscribed = queue.Queue()
        client = self.client = mqtt.Client(CallbackAPIVersion.VERSION2, name, protocol=version)
        client.on_message = lambda client, data, message: self.got.put((message.topic, message.payload))
        client.on_disconnect = lambda *arguments: self.lost.put(arguments)
        client.on_publish = lambda client, data, mid, code, properties: self.acknowledged.put(mid)
        client.on_connect = lambda *arguments: topic and client.subscribe(topic, qos=1)
        client.on_subscribe = lambda *arguments: subscribed.put(True)
        client.reconnect_delay_set(1, 1)
        client.connect("127.0.0.1", port)
        client.loop_start()
        if topic:
            subscribed.get(timeout=10)
        until(client.is_connected, 10)

    def send(self, topic, *payloads):
        for info in [self.client.publish(topic, payload, qos=1) for payload in payloads]:
            info.wait_for_publish(20)

    def take(self, count):
        return [self.got.get(timeout=20) for _ in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.client.disconnect()
        self.client.loop_stop()


NUMBERS = [str(number).encode() for number in range(200)]


def test_a_broker_of_old_hangs_up_on_version_5_and_takes_the_one_before(mosquitto):
    with Proxy(mosquitto.url, newest=4) as proxy, Peer(proxy.port, "old", V311, "t") as peer:
        peer.send("t", b"1")
        assert peer.take(1) == [("t", b"1")]
        refused = queue.Queue()
        client = mqtt.Client(CallbackAPIVersion.VERSION2, "new", protocol=V5, reconnect_on_failure=False)
        client.on_connect = client.on_disconnect = lambda *arguments: refused.put(arguments[-2])
        client.connect("127.0.0.1", proxy.port)
        client.loop_start()
        assert refused.get(timeout=20).is_failure
        client.loop_stop()


def test_bytes_are_counted_at_the_clients_socket(proxy):
    connect = bytes.fromhex("101200044d5154540402003c0006") + b"edge-9"
    publish = struct.pack(">BBH", 0x32, 6, 1) + b"t" + struct.pack(">H", 7) + b"x"
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(connect)
        down = len(client.recv(100))
        client.sendall(publish)
        down += len(client.recv(100))
        client.sendall(bytes.fromhex("e000"))
        assert client.recv(100) == b""
    (traffic,) = proxy.traffic
    assert (traffic.client, traffic.up, traffic.down) == ("edge-9", len(connect + publish) + 2, down)
    assert down == 4 + 4


@pytest.mark.parametrize("version", [V311, V5])
def test_messages_pass_whole_and_in_order(proxy, version):
    with Peer(proxy.port, "reader", version, "t/#") as reader, Peer(proxy.port, "writer", version) as writer:
        payloads = [bytes([number]) * 100_000 for number in range(20)]
        writer.send("t/1", *payloads)
        assert reader.take(20) == [("t/1", payload) for payload in payloads]
        assert proxy.clients() == ["reader", "writer"]


def test_every_publish_is_told_with_client_direction_topic_and_payload(mosquitto):
    told = []
    with (
        Proxy(mosquitto.url, on_publish=lambda *publish: told.append(publish)) as proxy,
        Peer(proxy.port, "reader", V5, "t/#") as reader,
        Peer(proxy.port, "writer", V311) as writer,
    ):
        writer.send("t/x", b"1")
        reader.take(1)
    assert told == [("writer", "up", "t/x", b"1"), ("reader", "down", "t/x", b"1")]


@pytest.mark.parametrize("version", [V311, V5])
@pytest.mark.parametrize("doubled", ["reader", "writer"])
def test_a_doubled_message_comes_twice_and_nobody_hangs_up(mosquitto, proxy, version, doubled):
    ports = {name: proxy.port if name == doubled else mosquitto.port for name in ("reader", "writer")}
    with (
        Peer(ports["reader"], "reader", version, "t/#") as reader,
        Peer(ports["writer"], "writer", version) as writer,
    ):
        proxy.rates = Rates(duplicate=1.0)
        writer.send("t/x", *NUMBERS)
        assert reader.take(400) == [("t/x", number) for number in NUMBERS for _ in range(2)]
        proxy.rates = Rates()
        writer.send("t/x", b"end")
        assert reader.take(1) == [("t/x", b"end")]
        assert writer.acknowledged.qsize() == 201
        assert (reader.lost.qsize(), writer.lost.qsize()) == (0, 0)
    assert proxy.done["duplicate"] == 200


def test_a_copy_has_a_packet_id_of_its_own_and_its_acknowledgement_stays_here(proxy):
    publish = struct.pack(">BBH", 0x32, 6, 1) + b"t" + struct.pack(">H", 65535) + b"x"
    with Peer(proxy.port, "reader", V311, "t"), socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(bytes.fromhex("100d00044d5154540402003c000161"))
        assert client.recv(4) == bytes.fromhex("20020000")
        proxy.rates = Rates(duplicate=1.0)
        client.sendall(publish)
        assert client.recv(4) == bytes.fromhex("4002ffff")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)


@pytest.mark.parametrize("version", [V311, V5])
def test_reordered_messages_all_come_in_another_order_and_nobody_hangs_up(proxy, version):
    with Peer(proxy.port, "reader", version, "t/#") as reader, Peer(proxy.port, "writer", version) as writer:
        proxy.rates = Rates(reorder=0.3, duplicate=0.3)
        writer.send("t/x", *NUMBERS)
        until(lambda: reader.got.qsize() == 200 + proxy.done["duplicate"], 20)
        came = [payload for _, payload in reader.take(reader.got.qsize())]
        assert set(came) == set(NUMBERS)
        assert came != sorted(came, key=int)
        assert (reader.lost.qsize(), writer.lost.qsize()) == (0, 0)


def test_the_same_seed_doubles_the_same_messages(mosquitto):
    def doubled():
        with (
            Proxy(mosquitto.url, seed=5) as proxy,
            Peer(proxy.port, "writer") as writer,
            Peer(mosquitto.port, "reader", V311, "t/#") as reader,
        ):
            proxy.rates = Rates(duplicate=0.5)
            writer.send("t/x", *NUMBERS)
            return reader.take(200 + proxy.done["duplicate"])

    first = doubled()
    assert len(first) > 200
    assert first == doubled()


def test_a_message_that_is_held_back_comes_though_none_follows(proxy):
    with Peer(proxy.port, "reader", V311, "t/#") as reader, Peer(proxy.port, "writer") as writer:
        proxy.rates = Rates(reorder=1.0)
        writer.send("t/x", b"1")
        assert reader.take(1) == [("t/x", b"1")]


def test_a_delayed_message_comes_late(proxy):
    with Peer(proxy.port, "reader", V311, "t/#") as reader, Peer(proxy.port, "writer") as writer:
        proxy.rates = Rates(delay=0.2)
        began = time.monotonic()
        for number in NUMBERS[:2]:
            writer.send("t/x", number)
        reader.take(2)
        assert time.monotonic() - began > 0.3


def test_a_stalled_connection_gets_nothing_until_the_stall_is_over(proxy):
    with Peer(proxy.port, "reader", V311, "t/#") as reader, Peer(proxy.port, "writer") as writer:
        assert proxy.stall(1.0, "reader") == 1
        began = time.monotonic()
        writer.send("t/x", b"1")
        assert reader.got.empty()
        reader.take(1)
        assert time.monotonic() - began > 0.9


def test_a_cut_connection_is_lost_while_others_stay(proxy):
    with Peer(proxy.port, "reader", V311, "t/#") as reader, Peer(proxy.port, "writer") as writer:
        assert proxy.cut("reader") == 1
        reader.lost.get(timeout=10)
        until(lambda: proxy.clients() == ["reader", "writer"], 10)
        assert writer.lost.empty()
    assert proxy.done["cut"] == 1


@pytest.mark.parametrize(("cut", "direction"), [("reader", "down"), ("writer", "up")])
def test_a_connection_that_is_cut_in_a_packet_delivers_half_of_it(proxy, cut, direction):
    with Peer(proxy.port, "reader", V311, "t/#") as reader, Peer(proxy.port, "writer") as writer:
        proxy.cut_within(cut, direction, at_least=1000)
        writer.send("t/x", b"passes")
        assert reader.take(1) == [("t/x", b"passes")]
        before = next(t.down if direction == "down" else t.up for t in proxy.traffic if t.client == cut)
        writer.client.publish("t/chunk", bytes(100_000), qos=0)
        {"reader": reader, "writer": writer}[cut].lost.get(timeout=10)
        after = next(t.down if direction == "down" else t.up for t in proxy.traffic if t.client == cut)
        assert after > before
        if direction == "down":
            assert 50_000 <= after - before < 51_000
        assert reader.got.empty()
    assert proxy.done[f"cut within {direction}"] == 1


def test_a_will_is_published_when_its_connection_is_cut(proxy):
    with Peer(proxy.port, "reader", V311, "t/#") as reader:
        client = mqtt.Client(CallbackAPIVersion.VERSION2, "dying")
        client.will_set("t/will", b"gone", qos=1)
        client.connect("127.0.0.1", proxy.port)
        client.loop_start()
        until(client.is_connected, 10)
        client.loop_stop()
        proxy.cut("dying")
        assert reader.take(1) == [("t/will", b"gone")]


def test_a_client_comes_back_after_the_broker_was_away():
    with MosquittoBroker() as broker, Proxy(broker.url) as proxy, Peer(proxy.port, "a", V5, "t/#") as peer:
        broker.stop(kill=True)
        peer.lost.get(timeout=10)
        broker.start()
        until(peer.client.is_connected, 20)


def test_what_is_no_mqtt_is_hung_up_on(proxy):
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(b"\x16\xff\xff\xff\xff\xff\xff")
        client.settimeout(10)
        assert client.recv(1) == b""


def test_it_closes_without_a_word_under_an_open_connection(mosquitto, caplog):
    with Proxy(mosquitto.url, seed=3) as proxy:
        client = socket.create_connection(("127.0.0.1", proxy.port))
        client.sendall(bytes.fromhex("101200044d5154540402003c0006") + b"edge-9")
        assert client.recv(100)
    with client:
        assert client.recv(100) == b""
    assert not caplog.records
