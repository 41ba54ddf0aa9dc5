"""A device trains for longer than its broker bears silence, and is not cut off: who is silent is."""

import time

import paho.mqtt.client as mqtt
import pytest
from fleets import Thread
from quadrants import quadrants
from waiting import until

from edge_sdk import BrokerError, EdgeClient, Engine
from edge_sdk.protocol import Topics
from edge_sdk.protocol.messages import Join, Leave, Taken, decode_from_device
from edge_sdk.transport import MqttTransport, Received
from edge_server import RunConfig, Server
from edge_simulation.broker import MosquittoBroker

KEEPALIVE, TOPICS, GONE = 2, Topics("f"), "silent/gone"


def silent_client(broker):
    """A client with the same keep-alive that connects and then answers nothing."""
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, "silent", reconnect_on_failure=False)
    client.will_set(GONE, b"", qos=1)
    client.connect("127.0.0.1", broker.port, KEEPALIVE)
    until(lambda: client.loop(0.1) or client.is_connected())
    return client


class Watcher:
    """What the device ``d`` says, and when the silent client has gone."""

    def __init__(self, broker):
        self.said, self.silent_gone = [], False
        self._transport = MqttTransport(broker.url)
        self._transport.connect(None, timeout=10)
        self._transport.subscribe(TOPICS.up("d", "+"))
        self._transport.subscribe(GONE)
        self.close = self._transport.close

    def look(self):
        while event := self._transport.receive(0.2):
            if isinstance(event, Received) and event.topic == GONE:
                self.silent_gone = True
            elif isinstance(event, Received):
                self.said.append(decode_from_device(TOPICS.parse(event.topic).kind, event.payload))

    def heard(self, kind):
        return [message for message in self.said if isinstance(message, kind)]


def test_a_device_that_trains_on_is_not_cut_off_by_a_broker_that_cuts_off_the_silent(tmp_path, norm):
    config = RunConfig(
        fleet="f", rounds=1, participants=1, epochs=10_000, batch_size=8, deadline=600, evaluation="none"
    )
    steps = []
    with MosquittoBroker() as broker:
        watcher = Watcher(broker)
        server = Server(norm, config, broker=broker.url, work_dir=tmp_path / "server")
        client = EdgeClient(
            MqttTransport(broker.url, keepalive=KEEPALIVE),
            fleet="f",
            data=quadrants(2000),
            work_dir=tmp_path / "device",
            device_id="d",
            engine=Engine(threads=1),
            on_progress=lambda progress: steps.append(progress.step),
        )
        serving, training = Thread(server.run), Thread(client.run)
        try:
            until(lambda: steps, 60)
            began = time.monotonic()
            silent = silent_client(broker)
            until(lambda: watcher.look() or watcher.silent_gone, 60)
            until(lambda: watcher.look() or time.monotonic() - began > 4 * KEEPALIVE)
            so_far = len(steps)
            until(lambda: len(steps) > so_far)
            watcher.look()
        finally:
            client.stop()
            server.stop()
        assert (training.result(), serving.result().finished) == (0, False)
        client.close()
        watcher.close()
        silent.socket().close()
    assert steps == list(range(1, len(steps) + 1))  # of one task
    assert watcher.heard(Taken)
    assert len({join.nonce for join in watcher.heard(Join)}) == 1
    assert watcher.heard(Leave) == []


@pytest.mark.parametrize("seconds", [0, -1, 65536])
def test_a_keepalive_that_is_none_is_refused(seconds):
    with pytest.raises(BrokerError, match="give 1 to 65535"):
        MqttTransport("mqtt://127.0.0.1", keepalive=seconds)
