"""Wall clocks that are wrong, or jump: monotonic time decides. Real processes over the embedded broker."""

import json
import os
import time
from contextlib import closing

import pytest
from processes import Machine
from quadrants import quadrants

from edge_sdk.data import save_npz
from edge_server import RunConfig
from edge_server.store import Store
from edge_simulation.broker import EmbeddedBroker

DAY = 24 * 3600.0
# Python imports it before anything else. What time.time gives out is kept, to be looked at when all is over.
SITECUSTOMIZE = """
import atexit, json, os, time

real, began, seen = time.time, time.time(), []

def clock():
    seen.append({clock})
    return seen[-1]

time.time, time.time_ns = clock, lambda: int(clock() * 1e9)

def tell():
    with open(os.path.join(os.path.dirname(__file__), "seen.json"), "w") as file:
        json.dump(seen, file)

atexit.register(tell)
"""
CLOCKS = {
    "of-1970": "real() - began",
    "ahead": "real() + 3600",
    "jumping": f"real() + {DAY} * (-1) ** len(seen)",
}


@pytest.fixture
def started_with(tmp_path, monkeypatch):
    """Starts a process with one of the clocks; gives it and what tells the times that it has seen."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)

    def start(clock, start_process, *arguments):
        folder = tmp_path / f"clock-{len(list(tmp_path.glob('clock-*')))}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE.format(clock=CLOCKS[clock]))
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, paths)]))
            process = start_process(*arguments)
        return process, lambda: json.loads((folder / "seen.json").read_text())

    return start


def test_devices_take_part_whatever_their_clocks_say_or_the_servers(tmp_path, norm, started_with):
    norm.write(tmp_path / "model.edge")
    save_npz(tmp_path / "data.npz", quadrants(24))
    before = time.time()
    with EmbeddedBroker() as broker:
        machine = Machine(tmp_path, broker.url)
        server, of_server = started_with(
            "jumping",
            machine.serve,
            *("--rounds", 3, "--participants", 3, "--min-devices", 3, "--min-participants", 3),
            *("--deadline", 60, "--join-timeout", 60),
        )
        devices = {clock: started_with(clock, machine.device, clock) for clock in CLOCKS}
        try:
            assert server.wait(120) == 0, server.err
            for clock, (device, _) in devices.items():
                assert (device.wait(), device.out) == (0, [f"{clock}: 3 updates accepted"]), device.err
        finally:
            machine.close()
    after = time.time()
    assert not any("lost" in line or "repeat" in line for line in server.err)
    of_device = {clock: seen() for clock, (_, seen) in devices.items()}
    assert all(len(seen) > 0 for seen in of_device.values())
    assert all(0 <= said < DAY for said in of_device["of-1970"])
    assert all(before + 3600 <= said <= after + 3600 for said in of_device["ahead"])
    for seen in (of_device["jumping"], of_server()):
        assert min(seen) < before - DAY / 2
        assert max(seen) > after + DAY / 2


def test_the_newest_run_of_a_store_is_the_one_that_was_begun_last(tmp_path, monkeypatch):
    with closing(Store(tmp_path)) as store:
        runs = []
        for fleet, clock in (("a", 5 * DAY), ("b", 0.0), ("c", 0.0)):
            monkeypatch.setattr("edge_server.store.time.time", lambda clock=clock: clock)
            store.take(fleet)
            config = RunConfig(fleet=fleet, rounds=1)
            runs.append(store.begin(config, b"bundle", b"model", b"state").id)
        assert [run.id for run in store.runs()] == runs
