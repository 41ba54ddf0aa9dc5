"""The ACL that ``edge-sdk broker-config`` writes, held by a real mosquitto."""

import shutil
import subprocess

import pytest
from waiting import until

from edge_sdk.errors import ProtocolError
from edge_sdk.protocol import Topics
from edge_sdk.transport import Credentials, MqttTransport, Received
from edge_server.broker_config import write_broker_config
from edge_simulation.broker import MosquittoBroker

TOPICS = Topics("f")


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acl")
    write_broker_config(folder, fleet="f", tls=False)
    tool = shutil.which("mosquitto_passwd")
    assert tool, "mosquitto_passwd is not installed: apt-get install mosquitto"
    for number, user in enumerate(("server", "one", "two")):
        create = ["-c"] if number == 0 else []
        subprocess.run(
            [tool, "-b", *create, folder / "passwords", user, "pw"], check=True, capture_output=True
        )
    config = f"allow_anonymous false\npassword_file {folder / 'passwords'}\nacl_file {folder / 'acl'}"
    with MosquittoBroker(extra_config=config) as running:
        yield running


@pytest.fixture
def peer(broker):
    opened = []

    def connected(user):
        transport = MqttTransport(broker.url, credentials=Credentials(username=user, password="pw"))
        transport.connect(None, timeout=10)
        opened.append(transport)
        return transport

    yield connected
    for transport in opened:
        transport.close()


def heard(transport, last):
    """The topics of what arrives, up to the message whose payload is ``last``."""
    topics = []

    def ended():
        event = transport.receive(0.2)
        if isinstance(event, Received):
            topics.append(event.topic)
            return event.payload == last
        return False

    until(ended)
    return topics[:-1]


def test_a_device_writes_as_itself_and_as_nobody_else(peer):
    server, one = peer("server"), peer("one")
    server.subscribe(f"{TOPICS.base}/#")
    server.publish(TOPICS.all("ready"), b"ready")
    heard(server, b"ready")
    forbidden = [TOPICS.up("two", "join"), TOPICS.all("who"), TOPICS.down("two", "task")]
    forbidden += [TOPICS.chunk("a" * 64, 0), Topics("other").up("one", "join")]
    for topic in [*forbidden, TOPICS.up("one", "join")]:
        one.publish(topic, b"x")
    one.publish(TOPICS.up("one", "here"), b"end")
    assert heard(server, b"end") == [TOPICS.up("one", "join")]


def test_a_device_reads_what_is_for_it_and_for_all_and_nothing_else(peer):
    server, one = peer("server"), peer("one")
    for topic in (TOPICS.down("two", "+"), TOPICS.up("two", "+"), f"{TOPICS.base}/#", TOPICS.all("+")):
        one.subscribe(topic)
    one.subscribe(TOPICS.down("one", "+"))
    server.subscribe(TOPICS.up("one", "+"))
    server.subscribe(TOPICS.up("server", "+"))
    # A broker takes what one peer sends in order: when these have come, both have subscribed.
    server.publish(TOPICS.up("server", "here"), b"listening")
    heard(server, b"listening")
    one.publish(TOPICS.up("one", "join"), b"ready")
    heard(server, b"ready")
    for topic in (TOPICS.down("two", "task"), TOPICS.up("two", "offer"), TOPICS.all("who")):
        server.publish(topic, b"x")
    server.publish(TOPICS.down("one", "task"), b"end")
    assert set(heard(one, b"end")) == {TOPICS.all("who")}


def test_a_device_reads_the_model(peer):
    server, one = peer("server"), peer("one")
    server.publish(TOPICS.chunk("b" * 64, 300), b"end", retain=True)
    one.subscribe(TOPICS.block("b" * 64, 1))
    assert heard(one, b"end") == []


def test_certificates_take_the_user_name_from_the_common_name(tmp_path):
    write_broker_config(tmp_path, fleet="f", tls=True)
    lines = (tmp_path / "mosquitto.conf").read_text().splitlines()
    assert {"require_certificate true", "use_identity_as_username true"} <= set(lines)


def test_a_fleet_that_would_open_other_topics_is_refused(tmp_path):
    with pytest.raises(ProtocolError):
        write_broker_config(tmp_path, fleet="#", tls=False)
