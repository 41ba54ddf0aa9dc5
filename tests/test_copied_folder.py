"""A device's work folder is copied while it runs, and a second process starts on the copy."""

import itertools
import re
import shutil

import pytest
from processes import machine_in
from waiting import until

from edge_sdk.protocol import Topics
from edge_sdk.protocol.messages import decode_from_device, decode_from_server
from edge_simulation.broker import MosquittoBroker
from edge_simulation.proxy import Proxy

DEVICE, TAKEOVERS = "one", 3


class Presence:
    """Whose process has been the device, by the welcomes that the server has sent."""

    def __init__(self):
        self._boots, self._welcomed = {}, []

    def __call__(self, _client, direction, topic, payload):
        address = Topics("p").parse(topic)
        if address is None or address.device != DEVICE or direction != "up":
            return
        if address.kind == "join":
            join = decode_from_device("join", payload)
            self._boots[join.nonce] = join.boot
        elif address.kind == "welcome":
            welcome = decode_from_server("welcome", payload)
            self._welcomed.append(self._boots[welcome.nonce])

    @property
    def held(self):
        """The processes in the order in which they took the device over."""
        return [boot for boot, _ in itertools.groupby(self._welcomed)]


@pytest.fixture
def machine(tmp_path, norm):
    made = machine_in(tmp_path, norm)
    yield made
    made.close()


def test_the_copy_ends_with_a_word_and_the_first_device_finishes_the_run(machine):
    presence = Presence()
    with MosquittoBroker() as broker, Proxy(broker.url, on_publish=presence) as proxy:
        machine.url = proxy.url
        server = machine.serve(
            *("--rounds", 3, "--participants", 2, "--min-devices", 2),
            *("--deadline", 60, "--join-timeout", 60),
        )
        first = machine.device(DEVICE)
        assert machine.device("guest", "--once").wait() == 0
        # Where the guest's update was the last of its round, the next one has begun and ends without it.
        waits = re.compile("round [23] waits: 1 of 2 devices are here")
        until(lambda: any(map(waits.match, server.err)), 60)
        shutil.copytree(machine.folder / "devices" / DEVICE, machine.folder / "devices" / "copy")
        clone = machine.device(DEVICE, work_dir="devices/copy")
        assert clone.wait(90) == 2, (clone.out, clone.err)
        (said,) = clone.errors()
        assert "its work folder is a copy of another device's: give it its own --work-dir and --id" in said
        assert first.running
        holders = presence.held
        machine.device("two")
        assert server.wait() == 0, server.err
        assert first.wait() == 0
        assert first.out == [f"{DEVICE}: 3 updates accepted"]
        machine.close()
    # The copy was the device for a while, or this shows nothing.
    assert len(set(holders)) == 2
    assert holders[0] == holders[-1]
    assert len(holders) - 1 <= TAKEOVERS
