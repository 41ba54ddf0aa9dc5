"""A server killed in the middle of an upload: what has come is not sent again, and the model is the same."""

import threading

import pytest
from processes import machine_in

from edge_sdk.protocol import decode_chunk
from edge_server.uploads import WINDOW
from edge_simulation.broker import MosquittoBroker
from edge_simulation.proxy import Proxy

RUN = ("--rounds", 1, "--participants", 1, "--deadline", 90, "--grace", 60, "--join-timeout", 60)
RUN += ("--chunk-bytes", 4096)
TAKEN = 5 * WINDOW
"""Chunks that the server has when it is killed."""


class Gate:
    """Sees the chunks that devices send; the one after TAKEN waits until it opens, and all behind it."""

    def __init__(self):
        self.sent, self.shut, self._open = [], threading.Event(), threading.Event()

    def __call__(self, client, direction, topic, payload):
        if direction == "up" and topic.endswith("/chunk"):
            self.sent.append(decode_chunk(payload).index)
            if len(self.sent) == TAKEN + 1:
                self.shut.set()
                self._open.wait(120)

    def open(self):
        self._open.set()


@pytest.fixture
def mosquitto():
    with MosquittoBroker() as broker:
        yield broker


def test_what_a_killed_server_has_of_an_update_is_not_sent_again(tmp_path, mosquitto, wide):
    models = []
    for name in ("undisturbed", "disturbed"):
        gate, machine = Gate(), machine_in(tmp_path / name, wide, mosquitto.url)
        try:
            with Proxy(mosquitto.url, on_publish=gate) as proxy:
                server = machine.serve(*RUN)
                machine.url = proxy.url
                device = machine.device("a", "--bundle", "model.edge")
                assert gate.shut.wait(60)
                if name == "disturbed":
                    server.kill()
                    machine.url = mosquitto.url
                    server = machine.serve(*RUN)
                gate.open()
                assert (device.wait(90), device.out) == (0, ["a: 1 updates accepted"])
                assert server.wait() == 0, server.err
        finally:
            gate.open()
            machine.close()
        models.append((machine.folder / "server" / "trained.edge").read_bytes())
        assert not (machine.folder / "server" / "uploads").exists()
    chunks = max(gate.sent) + 1
    assert chunks > 2 * TAKEN
    assert set(gate.sent[TAKEN + WINDOW :]).isdisjoint(range(TAKEN))
    assert len(gate.sent) <= chunks + 3 * WINDOW
    assert models[0] == models[1]
