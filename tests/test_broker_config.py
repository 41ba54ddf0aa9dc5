"""The ACL that ``edge-sdk broker-config`` writes, loaded by a real mosquitto: what counts is what arrives.

Brokers acknowledge forbidden messages of 3.1.1 and grant forbidden subscriptions, so each test has a control
that arrives.
"""

import itertools
import queue
import shutil
import socket
import ssl
import subprocess

import paho.mqtt.client as mqtt
import pytest
from certificates import Authority

from edge_sdk.cli import main
from edge_sdk.errors import EdgeError, ProtocolError
from edge_sdk.protocol import Topics
from edge_server.broker_config import SERVER, write_broker_config
from edge_simulation.broker import MosquittoBroker

TOPICS = Topics("f")
ALL = f"{TOPICS.base}/#"
ODD = ("one/join", "one/", "+", "#", "one+")
USERS = (SERVER, "one", "two", *ODD)


class Guarded:
    """A mosquitto with the configuration of one mode, and what each of its users shows."""

    def __init__(self, folder, *options):
        assert main(["broker-config", "--fleet", "f", "--out", str(folder), *options]) == 0
        self.authority = authority = Authority(folder) if "--tls" in options else None
        self.passwords = options != ("--tls",)
        if authority:
            for name, file in authority.issue("broker", "127.0.0.1").items():
                file.rename(folder / f"broker.{'crt' if name == 'cert' else 'key'}")
        if self.passwords:
            set_passwords(folder / "passwords", dict.fromkeys(USERS, "pw"))
        self._certificates = {} if self.passwords else {user: authority.issue(user) for user in USERS}
        self.broker = MosquittoBroker(config=(folder / "mosquitto.conf").read_text())

    def shows(self, user):
        """What ``user`` shows to get in."""
        return {"username": user, "password": "pw"} if self.passwords else self._certificates[user]


def set_passwords(file, logins):
    tool = shutil.which("mosquitto_passwd")
    assert tool, "mosquitto_passwd is not installed: apt-get install mosquitto"
    for number, (user, password) in enumerate(logins.items()):
        create = ["-c"] if number == 0 else []
        subprocess.run([tool, "-b", *create, file, user, password], check=True, capture_output=True)


class Peer:
    """A user of the broker, without any code of ours."""

    _numbers = itertools.count()

    def __init__(self, guarded, version, *, will=None, client_id=None, username=None, password=None, **files):
        client_id = client_id or f"peer-{next(self._numbers)}"
        self._client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, client_id, protocol=version, reconnect_on_failure=False
        )
        if username is not None:
            self._client.username_pw_set(username, password)
        if guarded.authority:
            context = ssl.create_default_context(cafile=guarded.authority.file)
            if files:
                context.load_cert_chain(files["cert"], files["key"])
            self._client.tls_set_context(context)
        if will is not None:
            self._client.will_set(will, b"will", qos=1)
        self._answers, self._granted, self._arrived = queue.Queue(), queue.Queue(), queue.Queue()
        self._client.on_connect = lambda _c, _d, _f, code, _p: self._answers.put(not code.is_failure)
        self._client.on_disconnect = lambda *_: self._answers.put(False)
        self._client.on_subscribe = lambda *_: self._granted.put(True)
        self._client.on_message = lambda _c, _d, message: self._arrived.put((message.topic, message.payload))
        self._client.connect("127.0.0.1", guarded.broker.port)
        self._client.loop_start()
        self.admitted = self._answers.get(timeout=10)

    def publish(self, topic, payload=b"x", *, retain=False):
        """Publish; in 5 the broker says here that it is forbidden, in 3.1.1 it says nothing."""
        self._client.publish(topic, payload, qos=1, retain=retain).wait_for_publish(10)

    def subscribe(self, *patterns):
        for pattern in patterns:
            self._client.subscribe(pattern, qos=1)
            assert self._granted.get(timeout=10)

    def heard(self, last):
        """The topics of what arrives, up to the message whose payload is ``last``."""
        topics = []
        while (event := self._arrived.get(timeout=10))[1] != last:
            topics.append(event[0])
        return topics

    def heard_so_far(self):
        """The topics of all that the broker has sent before it answers now."""
        self.subscribe("now")
        return {self._arrived.get()[0] for _ in range(self._arrived.qsize())}

    def vanish(self):
        """Go without a goodbye, so that the broker publishes the will."""
        self._client.socket().shutdown(socket.SHUT_RDWR)
        self._client.loop_stop()

    def close(self):
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture(scope="module", params=["", "--tls", "--tls --passwords"])
def guarded(request, tmp_path_factory):
    made = Guarded(tmp_path_factory.mktemp("broker"), *request.param.split())
    with made.broker:
        yield made


@pytest.fixture(params=[mqtt.MQTTv5, mqtt.MQTTv311], ids=["5", "3.1.1"])
def peer(request, guarded):
    """Connects as a user, in one version of MQTT."""
    opened = []

    def connected(user=None, **options):
        made = Peer(guarded, request.param, **(guarded.shows(user) if user else {}), **options)
        opened.append(made)
        return made

    yield connected
    for each in opened:
        each.close()


@pytest.fixture
def server(peer):
    """The server, which hears everything."""
    made = peer(SERVER)
    made.subscribe(ALL)
    return made


DOWN, MODEL, WHO = TOPICS.down("two", "task"), TOPICS.chunk("a" * 64, 300), TOPICS.all("who")


@pytest.mark.parametrize("client_id", [None, "two", SERVER])
def test_a_device_writes_as_itself_and_as_nobody_else(peer, server, client_id):
    one = peer("one", client_id=client_id)
    for topic in (
        TOPICS.up("two", "join"),
        TOPICS.up("two", "chunk"),
        WHO,
        DOWN,
        MODEL,
        TOPICS.down("one", "task"),
    ):
        one.publish(topic)
        one.publish(topic, retain=True)
    one.publish(TOPICS.up("one", "here"), b"end")
    assert server.heard(b"end") == []


def test_what_a_device_may_not_write_others_may(peer, server):
    two = peer("two")
    two.publish(TOPICS.up("two", "join"))
    two.publish(TOPICS.up("two", "chunk"), b"end")
    assert server.heard(b"end") == [TOPICS.up("two", "join")]
    for topic in (WHO, DOWN, MODEL):
        server.publish(topic)
    server.publish(TOPICS.all("finished"), b"last")
    assert server.heard(b"last") == [WHO, DOWN, MODEL]


def test_a_device_reads_what_is_for_it_and_for_all_and_nothing_else(peer, server):
    kept = TOPICS.down("two", "kept")
    server.publish(kept, retain=True)
    one, two = peer("one"), peer("two")
    down, up = TOPICS.down("two", "+"), TOPICS.up("+", "+")
    one.subscribe(down, up, kept, ALL, "#", f"$share/g/{down}", f"$share/g/{up}")
    two.subscribe(TOPICS.down("two", "+"))
    two.publish(TOPICS.up("two", "offer"))
    for topic in (DOWN, TOPICS.up("one", "offer"), WHO, MODEL, TOPICS.down("one", "task")):
        server.publish(topic)
    server.publish(TOPICS.down("one", "task"), b"end")
    server.publish(DOWN, b"last")
    assert set(one.heard(b"end")) == {WHO, MODEL, TOPICS.down("one", "task")}
    assert two.heard(b"last") == [kept, DOWN]
    server.publish(kept, b"", retain=True)


def test_a_device_takes_the_model_that_was_published_before_it_came(peer, server):
    server.publish(MODEL, b"end", retain=True)
    one = peer("one")
    one.subscribe(TOPICS.block("a" * 64, 1))
    assert one.heard(b"end") == []
    server.publish(MODEL, b"", retain=True)


def test_a_device_leaves_no_will_in_anothers_name(peer, server):
    for name in ("two", "one"):
        peer("one", will=TOPICS.up(name, "leave")).vanish()
    assert server.heard(b"will") == []
    server.publish(WHO, b"end")
    assert server.heard(b"end") == []


@pytest.mark.parametrize("user", ODD)
def test_no_user_name_opens_anothers_topics(peer, server, user):
    odd, one = peer(user), peer("one")
    one.subscribe(TOPICS.down("one", "+"))
    if odd.admitted:
        odd.subscribe(TOPICS.down("one", "task"), ALL)
        odd.publish(TOPICS.up("one", "join"))
    server.publish(TOPICS.down("one", "task"), b"for one")
    server.publish(WHO, b"end")
    assert one.heard(b"for one") == []
    assert server.heard(b"end") == [TOPICS.down("one", "task")]
    assert not odd.admitted or odd.heard_so_far() <= {WHO}


def test_who_is_unknown_is_not_let_in(peer, guarded, tmp_path):
    unknown = [{}]
    if guarded.authority:
        unknown += [Authority(tmp_path).issue("one"), guarded.authority.issue(None, "host.example")]
    if guarded.passwords:
        wrong = (("one", "wrong"), ("one", ""), ("three", "pw"))
        unknown += [{"username": user, "password": password} for user, password in wrong]
        # A certificate is no login where passwords are.
        unknown += [guarded.authority.issue("one")] if guarded.authority else []
    assert not any(peer(**shown).admitted for shown in unknown)
    assert peer("one").admitted


LOOKALIKE = "\N{CYRILLIC SMALL LETTER A}"
IN_TOPICS, IN_FILES = (
    ("", "#", "+", "f/#", "a/b", "$SYS"),
    ("f\nuser x", "f\n", "f\r", "f\0", 'f"', "f'", "f g", "%u"),
)


@pytest.mark.parametrize("fleet", [*IN_TOPICS, *IN_FILES, "..", "f..g", "-f", LOOKALIKE, "f\u200b", "f" * 65])
def test_a_fleet_of_an_odd_name_enters_no_file(tmp_path, capsys, fleet):
    assert main(["broker-config", f"--fleet={fleet}", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("edge-sdk: fleet ")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ProtocolError):
        write_broker_config(tmp_path / "out", fleet=fleet, tls=True)


@pytest.mark.parametrize("name", ["out\nallow_anonymous true", "out\r", "out\0", "out\u2028x", "out\udcff"])
def test_a_folder_that_would_add_lines_enters_no_file(tmp_path, name):
    with pytest.raises(EdgeError, match="choose another folder"):
        write_broker_config(tmp_path / name, fleet="f", tls=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a folder", "an 'odd' \"one\" # ü", " "])
def test_a_folder_may_have_spaces_and_quotes(tmp_path, name):
    guarded = Guarded(tmp_path / name)
    with guarded.broker:
        one = Peer(guarded, mqtt.MQTTv5, **guarded.shows("one"))
        assert one.admitted
        one.close()
