"""A server stands still while a large fleet uploads, on a broker that drops what its queue cannot hold."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import paho.mqtt.client as paho
import pytest
from processes import Machine
from quadrants import quadrants
from waiting import until

from edge_sdk import EdgeClient, Engine, RunError
from edge_sdk.protocol import Topics
from edge_sdk.protocol.messages import Here, Join, encode
from edge_server.store import Store
from edge_simulation.broker import MosquittoBroker

UPLOADING, PRESENT, STILL = 50, 5000, 10.0
QUEUE = 1000
"""Messages that mosquitto 2 keeps for a subscriber by default."""


def connected(url):
    """A client with a thread of its own, connected."""
    client = paho.Client(paho.CallbackAPIVersion.VERSION2)
    host, port = url.removeprefix("mqtt://").split(":")
    client.connect(host, int(port))
    client.loop_start()
    until(client.is_connected)
    return client


def crowd(url, stop):
    """Devices that are there and have nothing to train on, spoken for by one client."""
    client = connected(url)
    topics = Topics("p")
    names = [f"idle-{number:04}" for number in range(PRESENT)]
    nonce = "a" * 16
    for number, name in enumerate(names):
        join = Join(sdk="0", install=f"{number:032x}", boot="b" * 16, nonce=nonce, examples=0)
        client.publish(topics.up(name, "join"), encode(join), qos=1)
        time.sleep(0.002)
    while not stop.is_set():
        for name in names:
            client.publish(topics.up(name, "here"), encode(Here(nonce=nonce, examples=0)), qos=1)
            time.sleep(0.02)  # as slowly as the server asks of so many
            if stop.is_set():
                break
    client.loop_stop()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_all_is_delivered_when_the_server_stands_still_for_ten_seconds(tmp_path, cnn):
    cnn.write(tmp_path / "model.edge")
    with MosquittoBroker() as broker:
        machine, stop = Machine(tmp_path, broker.url), threading.Event()
        server = machine.serve(
            *("--rounds", 1, "--participants", UPLOADING, "--min-devices", UPLOADING),
            *("--chunk-bytes", 1024, "--deadline", 200, "--join-timeout", 200, "--keep-updates"),
        )
        server.says("waits:")
        idle = threading.Thread(target=crowd, args=(broker.url, stop))
        idle.start()
        clients = [
            EdgeClient(
                broker.url,
                fleet="p",
                data=quadrants(12, seed=number),
                work_dir=tmp_path / "devices" / str(number),
                device_id=f"d{number:02}",
                engine=Engine(threads=1),
            )
            for number in range(UPLOADING)
        ]
        with ThreadPoolExecutor(UPLOADING) as pool:
            runs = [pool.submit(client.run, rounds=1) for client in clients]
            try:
                until(lambda: updates(tmp_path), 120)
                os.kill(server.pid, signal.SIGSTOP)
                time.sleep(STILL)
                os.kill(server.pid, signal.SIGCONT)
                assert [run.result(150) for run in runs] == [1] * UPLOADING
            finally:
                stop.set()
                for client in clients:
                    client.stop()
                idle.join()
        assert server.wait(60) == 0, server.err
        counted = [result.device for result in updates(tmp_path)]
        assert sorted(counted) == [client.device_id for client in clients]
        machine.close()


def test_without_grants_that_broker_drops_what_it_has_acknowledged(cnn):
    chunks = UPLOADING * (cnn.manifest.nbytes // 1024)
    with MosquittoBroker() as broker:
        assert arrived(broker, QUEUE) == QUEUE
        assert QUEUE <= arrived(broker, chunks) < chunks / 2


def arrived(broker, count):
    """How many of so many chunks, all acknowledged, come to a subscriber that stands still meanwhile."""
    sender, still = connected(broker.url), connected(broker.url)
    ready, payloads = threading.Event(), []
    still.on_message = lambda _client, _data, message: payloads.append(message.payload)
    still.on_subscribe = lambda *_: ready.set()
    still.subscribe("up/#", qos=1)
    assert ready.wait(10)
    still.loop_stop()
    for sent in [sender.publish("up/chunk", bytes(1024), qos=1) for _ in range(count)]:
        sent.wait_for_publish(60)
        assert sent.is_published()
    still.loop_start()

    def behind_all_others():
        sender.publish("up/end", b"end", qos=1)
        return b"end" in payloads

    until(behind_all_others)
    for client in (sender, still):
        client.disconnect()
        client.loop_stop()
    return payloads.index(b"end")


def updates(folder):
    """The results that the server has accepted so far."""
    try:
        store = Store(folder / "server", exclusive=False)
    except RunError:
        return []  # the server has not begun its run yet
    rows = store.rounds(store.runs()[-1].id)
    return store.results(rows[-1]) if rows else []
