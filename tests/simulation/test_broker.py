import os
import queue
import signal
import socket
import subprocess
import sys
import time

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from edge_sdk.errors import EdgeError
from edge_simulation.broker import EmbeddedBroker, MosquittoBroker


class Peer:
    """A paho client that keeps what it gets in a queue."""

    def __init__(self, port):
        self.got = queue.Queue()
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv311)
        self.client.on_message = lambda client, data, message: self.got.put(message.payload)
        subscribed = queue.Queue()
        self.client.on_subscribe = lambda *args: subscribed.put(True)
        self._subscribed = subscribed
        self.client.connect("127.0.0.1", port)
        self.client.loop_start()

    def subscribe(self, topic):
        self.client.subscribe(topic, qos=1)
        self._subscribed.get(timeout=10)

    def publish(self, topic, payload, retain=False):
        self.client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(10)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.client.disconnect()
        self.client.loop_stop()


@pytest.fixture(scope="module")
def embedded():
    with EmbeddedBroker() as broker:
        yield broker


def refuses(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def until(fact, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_large_retained_messages_reach_a_late_subscriber(embedded):
    payloads = {os.urandom(130_000) for _ in range(4)}
    with Peer(embedded.port) as sender, Peer(embedded.port) as reader:
        for number, payload in enumerate(payloads):
            sender.publish(f"model/{number}", payload, retain=True)
        reader.subscribe("model/#")
        assert {reader.got.get(timeout=10) for _ in payloads} == payloads


def test_a_burst_of_messages_gets_through(embedded):
    with Peer(embedded.port) as sender, Peer(embedded.port) as reader:
        reader.subscribe("burst/#")
        infos = [sender.client.publish(f"burst/{n % 7}", str(n), qos=1) for n in range(300)]
        for info in infos:
            info.wait_for_publish(20)
        assert sorted(int(reader.got.get(timeout=20)) for _ in range(300)) == list(range(300))


def test_a_client_gets_no_retained_message_that_only_others_asked_for(embedded):
    with Peer(embedded.port) as sender, Peer(embedded.port) as other:
        sender.publish("secret/1", b"no", retain=True)
        other.subscribe("secret/#")
        with Peer(embedded.port) as reader:
            reader.subscribe("mine")
            sender.publish("mine", b"yes")
            assert reader.got.get(timeout=10) == b"yes"
            assert reader.got.empty()


def test_the_url_names_the_port(embedded):
    assert embedded.url == f"mqtt://127.0.0.1:{embedded.port}"


@pytest.mark.parametrize("kind", [EmbeddedBroker, MosquittoBroker])
def test_a_port_in_use_is_named_with_the_fix(embedded, kind):
    broker = kind(embedded.port)
    with pytest.raises(EdgeError, match=f"port {embedded.port} is in use: choose another with --port"):
        broker.start()
    broker.close()


def test_a_port_that_does_not_exist_is_refused():
    with pytest.raises(EdgeError, match="70000"):
        EmbeddedBroker(70000)


def test_closing_with_a_client_connected_is_quick():
    broker = EmbeddedBroker()
    broker.start()
    with Peer(broker.port):
        began = time.monotonic()
        broker.close()
        assert time.monotonic() - began < 4
    assert refuses(broker.port)
    broker.close()


SCRIPT = """
import sys, time
from edge_simulation.broker import EmbeddedBroker
with EmbeddedBroker() as broker:
    try:
        print(broker.port, flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        import socket
        socket.create_connection(("127.0.0.1", broker.port), timeout=5).close()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_it_ends_with_its_parent_and_without_a_word(number):
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with parent:
        port = int(parent.stdout.readline())
        # As a terminal does it: Ctrl-C goes to the group, a kill to the parent alone.
        (os.killpg if number == signal.SIGINT else os.kill)(parent.pid, number)
        _, said = parent.communicate(timeout=20)
    until(lambda: refuses(port))
    assert said == ""
    assert parent.returncode == (0 if number == signal.SIGINT else -signal.SIGKILL)


def test_mosquitto_comes_back_on_its_port_with_its_retained_messages():
    with MosquittoBroker() as broker:
        port = broker.port
        with Peer(port) as sender:
            sender.publish("kept", b"yes", retain=True)
        broker.stop()
        assert refuses(port)
        broker.start()
        assert broker.port == port
        with Peer(port) as reader:
            reader.subscribe("kept")
            assert reader.got.get(timeout=10) == b"yes"
        folder = broker.folder
    assert not folder.exists()


def test_mosquitto_tells_its_process_while_it_runs():
    broker = MosquittoBroker()
    assert broker.pid == 0
    with broker:
        os.kill(broker.pid, 0)
        broker.stop()
        assert broker.pid == 0


def test_mosquitto_takes_more_configuration_and_names_what_it_refuses():
    with MosquittoBroker(extra_config="max_queued_messages 10") as broker:
        assert not refuses(broker.port)
    broker = MosquittoBroker(extra_config="no_such_option 1")
    with pytest.raises(EdgeError, match="no_such_option"):
        broker.start()
    broker.close()


def test_missing_mosquitto_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(EdgeError, match="apt-get install mosquitto"):
        MosquittoBroker()
