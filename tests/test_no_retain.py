"""Brokers of MQTT 3.1.1 that keep no retained messages, or take small ones only, and cannot say so."""

from contextlib import contextmanager

import pytest
from processes import machine_in

from edge_sdk.transport.outstanding import SUSPECT, Outstanding, Retaining
from edge_simulation.broker import MosquittoBroker
from edge_simulation.proxy import Proxy

ONE = ("--rounds", 2, "--participants", 1, "--deadline", 90, "--join-timeout", 90)
DENIED = "topic readwrite edge/#\ntopic deny edge/v1/p/model/#\n"


@pytest.fixture
def machine(tmp_path, norm):
    made = machine_in(tmp_path, norm)
    yield made
    made.close()


@contextmanager
def old_broker(machine, config):
    """A mosquitto to which nobody can speak MQTT 5; gives the topics of models, as (direction, topic)."""
    models = set()

    def seen(_client, direction, topic, _payload):
        if "/model/" in topic:
            models.add((direction, topic))

    with (
        MosquittoBroker(extra_config=config) as broker,
        Proxy(broker.url, on_publish=seen, newest=4) as proxy,
    ):
        machine.url = proxy.url
        yield models
        machine.close()


def test_a_server_that_is_told_so_publishes_nothing_retained_and_serves(machine):
    with old_broker(machine, "retain_available false") as models:
        server = machine.serve("--no-retain", *ONE)
        device = machine.device("a")
        assert (server.wait(), device.wait()) == (0, 0), server.err
    assert models == set()
    assert not any("lost" in line for line in [*server.err, *device.err])


def test_a_server_that_is_not_told_finds_it_out_says_so_and_serves(machine):
    with old_broker(machine, "retain_available false") as models:
        server = machine.serve(*ONE)
        device = machine.device("a")
        assert (server.wait(120), device.wait()) == (0, 0), server.err
    assert {direction for direction, _ in models} == {"up"}
    assert any("keep no retained messages: it is sent none from now on" in line for line in server.err)
    assert not any("lost" in line for line in device.err)


def test_where_what_is_retained_is_silently_dropped_devices_ask_for_it(machine):
    (machine.folder / "acl").write_text(DENIED)
    with old_broker(machine, f"acl_file {machine.folder / 'acl'}") as models:
        server = machine.serve(*ONE)
        device = machine.device("a")
        assert (server.wait(120), device.wait()) == (0, 0), server.err
    assert {direction for direction, _ in models} == {"up"}
    assert not any("lost" in line for line in [*server.err, *device.err])


def test_a_limit_that_cannot_be_learned_is_set_by_an_option(machine):
    with old_broker(machine, "max_packet_size 10000"):
        server = machine.serve("--chunk-bytes", 8000, *ONE)
        device = machine.device("a")
        assert (server.wait(), device.wait()) == (0, 0), server.err
    assert not any("lost" in line for line in [*server.err, *device.err])


def test_a_limit_that_is_not_set_is_found_out_and_the_option_named(machine):
    with old_broker(machine, "max_packet_size 10000"):
        server = machine.serve(*ONE)
        server.says("bytes: set chunk_bytes lower")


def test_the_file_of_settings_has_it_too(machine):
    (machine.folder / "run.toml").write_text("retain = false\n")
    with old_broker(machine, "retain_available false") as models:
        server = machine.serve("--config", "run.toml", *ONE)
        machine.device("a")
        assert server.wait() == 0, server.err
    assert models == set()
    (machine.folder / "run.toml").write_text('retain = "no"\n')
    refused = machine.serve("--config", "run.toml", *ONE)
    assert refused.wait() == 2
    assert refused.errors() == ["edge-sdk: retain in the --config file is 'no': give true or false"]


def hung_up_on(*, taken=False, sent=True):
    """The messages of a connection that has ended: retained ones that were taken, and that were not."""
    outstanding = Outstanding(9)
    for mid, (wanted, acknowledged) in enumerate([(taken, True), (sent, False)]):
        if wanted:
            outstanding.sent(outstanding.reserve("model", 99, 1.0, retain=True), mid)
        if wanted and acknowledged:
            outstanding.acknowledged(mid, taken=True)
    return outstanding


def verdicts(*ends, hung_up=True):
    retaining = Retaining()
    return [retaining.is_refused(end, hung_up=hung_up) for end in ends]


def test_a_broker_is_suspected_only_time_after_time_and_never_once_it_has_taken_one():
    often = [hung_up_on() for _ in range(SUSPECT)]
    assert verdicts(*often) == [False] * (SUSPECT - 1) + [True]
    assert not any(verdicts(hung_up_on(taken=True), *often))
    assert not any(verdicts(*often[1:], hung_up_on(sent=False), *often[1:]))
    assert not any(verdicts(*often, hung_up=False))
