"""Real ``edge-sdk device`` processes over a real mosquitto: killed, stopped, without room, and on visits."""

import resource
import signal
import threading

import pytest
from processes import machine_in
from quadrants import quadrants
from waiting import until

from edge_sdk.data import save_npz
from edge_sdk.partial import FLUSH_EVERY
from edge_sdk.protocol import decode_chunk
from edge_sdk.tensors import encode, sha256
from edge_server.store import Store
from edge_simulation.broker import MosquittoBroker
from edge_simulation.proxy import Proxy

LONG = ("--rounds", 1, "--participants", 1, "--deadline", 90, "--grace", 60, "--join-timeout", 60)
CUT_AFTER = FLUSH_EVERY + 8


@pytest.fixture(scope="module")
def mosquitto():
    with MosquittoBroker(extra_config="max_packet_size 20000") as broker:
        yield broker


@pytest.fixture
def machine(tmp_path, mosquitto, norm):
    made = machine_in(tmp_path, norm, mosquitto.url)
    save_npz(tmp_path / "many.npz", quadrants(60_000))
    unfit = quadrants(60_000)
    unfit.labels[:] = 9
    save_npz(tmp_path / "unfit.npz", unfit)
    yield made
    made.close()


class Gate:
    """Sees the chunks of one blob on their way to a device; nothing passes after CUT_AFTER until it opens."""

    def __init__(self, blob):
        self._blob, self._open = blob, threading.Event()
        self.seen = []

    def __call__(self, client, direction, topic, payload):
        if direction == "down" and ("/model/" in topic or topic.endswith("/chunk")):
            chunk = decode_chunk(payload)
            if chunk.blob == self._blob:
                self.seen.append(chunk.index)
            if len(self.seen) == CUT_AFTER:
                self._open.wait(120)

    def open(self):
        self._open.set()


def held(folder, blob):
    """The chunks that a device has on disk."""
    path = folder / "partial" / f"{blob}.map"
    bits = path.read_bytes()[16:] if path.exists() else b""
    return {index for index in range(8 * len(bits)) if bits[index // 8] >> index % 8 & 1}


def test_a_device_killed_in_the_middle_of_a_download_asks_only_for_what_is_missing(machine, mosquitto, wide):
    wide.write(machine.folder / "model.edge")
    model, folder = sha256(encode(wide.weights)), machine.folder / "devices" / "a"
    gate = Gate(model)
    server = machine.serve(*LONG)
    with Proxy(mosquitto.url, on_publish=gate) as proxy:
        machine.url = proxy.url
        first = machine.device("a", "--bundle", "model.edge")
        until(lambda: len(held(folder, model)) >= FLUSH_EVERY, 60)
        first.kill()
        gate.open()
        until(lambda: not proxy.clients())
        kept, before = held(folder, model), len(gate.seen)
        second = machine.device("a", "--bundle", "model.edge")
        assert second.wait() == 0
    assert server.wait() == 0
    chunks = set(range(max(gate.seen) + 1))
    assert len(chunks) > 50
    assert FLUSH_EVERY <= len(kept) <= CUT_AFTER
    assert set(gate.seen[before:]) == chunks - kept
    assert second.out == ["a: 1 updates accepted"]
    assert list((folder / "partial").iterdir()) == []


def stopped_in_training(machine, server, *options):
    """A device that is at its first training, and its server, which was stopped meanwhile."""
    device = machine.device("a", *options, data="many.npz")
    until((machine.folder / "devices" / "a" / "newest.json").exists, 60)
    server.signal(signal.SIGSTOP)
    return device


def finished_update(machine):
    """Wait until the device has its update on disk."""
    until((machine.folder / "devices" / "a" / "pending.json").exists, 90)


def examples_accepted(machine):
    store = Store(machine.folder / "server", exclusive=False)
    try:
        return [update.examples for run in store.runs() for update in store.results(store.rounds(run.id)[0])]
    finally:
        store.close()


def test_a_device_killed_before_its_receipt_hands_in_without_training_again(machine):
    server = machine.serve(*LONG)
    device = stopped_in_training(machine, server)
    finished_update(machine)
    device.kill()
    server.signal(signal.SIGCONT)
    # These it could not train on.
    again = machine.device("a", data="unfit.npz")
    assert (again.wait(), again.out) == (0, ["a: 1 updates accepted"])
    assert again.errors() == []
    assert server.wait() == 0
    assert examples_accepted(machine) == [60_000]


def test_a_second_visit_hands_in_what_the_first_has_finished(machine):
    server = machine.serve(*LONG)
    first = stopped_in_training(machine, server, "--check-in", 60)
    finished_update(machine)
    first.interrupt()
    assert (first.wait(30), first.out) == (130, ["a: 0 updates accepted, come back any time"])
    server.signal(signal.SIGCONT)
    second = machine.device("a", "--check-in", 60, data="unfit.npz")
    assert (second.wait(), second.out) == (0, ["a: 1 updates accepted, the run is finished"])
    assert second.errors() == []
    assert server.wait() == 0
    assert examples_accepted(machine) == [60_000]


def test_a_visit_without_work_says_when_to_come_back(machine):
    server = machine.serve(*LONG)
    stopped_in_training(machine, server).signal(signal.SIGSTOP)
    server.signal(signal.SIGCONT)
    visitor = machine.device("visitor", "--check-in", 60)
    assert visitor.wait() == 0
    assert visitor.out[0].startswith("visitor: 0 updates accepted, come back in ")


def test_a_visit_and_staying_for_one_update_exclude_each_other(machine):
    refused = machine.device("a", "--check-in", 60, "--once")
    assert refused.wait() == 2
    assert "not allowed with argument" in refused.err[-1]


def test_a_device_whose_disk_is_full_declines_and_goes_on(machine, wide):
    wide.write(machine.folder / "model.edge")
    server = machine.serve(*LONG, "--participants", 2, "--min-participants", 1)
    device = machine.device("a", "--bundle", "model.edge")
    device.says("welcomed")
    resource.prlimit(device.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    machine.device("b", data="data.npz")
    device.says("could not do its task: this device's work folder cannot be written")
    assert device.errors() == []
    assert device.running
    assert server.wait() == 0
