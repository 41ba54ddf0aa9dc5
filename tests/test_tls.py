"""TLS, logins and ACLs over a real mosquitto: who is let in takes part, who is not is told why, and ends."""

import signal
from contextlib import ExitStack

import pytest
from certificates import EXPIRED, NOT_YET, Authority
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from fleets import Thread
from quadrants import quadrants
from test_broker_config import set_passwords
from waiting import until

from edge_sdk import EdgeClient, Engine
from edge_sdk.cli import main
from edge_sdk.data import save_npz
from edge_sdk.errors import BrokerError
from edge_sdk.protocol import Topics
from edge_sdk.transport import Connected, Credentials, Disconnected, MqttTransport, Received
from edge_server import RunConfig, Server
from edge_server.broker_config import SERVER, write_broker_config
from edge_simulation.broker import MosquittoBroker

TOPICS = Topics("f")
MUTE = f"user mute\ntopic deny {TOPICS.up('mute', 'join')}\n"


class World:
    """An authority, a stranger to it, and a mosquitto of each kind that a test asks for."""

    def __init__(self, folder, brokers):
        self.folder, self._brokers, self._running = folder, brokers, {}
        self.authority, self.stranger = Authority(folder / "ours"), Authority(folder / "strange")
        self.ca = self.authority.file

    def broker(self, kind):
        if kind not in self._running:
            self._running[kind] = self._brokers.enter_context(self._make(kind))
        return self._running[kind]

    def _make(self, kind):
        issue = self.authority.issue
        match kind:
            case "plain":
                return MosquittoBroker()
            case "with passwords":
                return self.with_passwords(self.folder / "passwords", {SERVER: "s", "one": "1", "mute": "m"})
            case "TLS with passwords":
                folder = self.folder / "both"
                folder.mkdir()
                self.show(folder, issue("broker", "127.0.0.1"))
                return self.with_passwords(folder, {SERVER: "s", "one": "1"}, tls=True)
            case "mutual":
                return self.mutual(self.folder / "mutual")
            case "mutual, TLS 1.2":
                return self.mutual(self.folder / "mutual", "tls_version tlsv1.2")
            case "good":
                shown = issue("broker", "127.0.0.1")
            case "expired":
                shown = issue("broker", "127.0.0.1", valid=EXPIRED)
            case "not yet valid":
                shown = issue("broker", "127.0.0.1", valid=NOT_YET)
            case "of another host":
                shown = issue("broker", "broker.example")
            case "of another authority":
                shown = self.stranger.issue("broker", "127.0.0.1")
        return MosquittoBroker(extra_config=f"certfile {shown['cert']}\nkeyfile {shown['key']}")

    def mutual(self, folder, extra_config=""):
        """With the configuration of certificates, whose files lie in ``folder``."""
        write_broker_config(folder, fleet="f", tls=True)
        self.show(folder, self.authority.issue("broker", "127.0.0.1"))
        (folder / "ca.crt").write_bytes(self.ca.read_bytes())
        return MosquittoBroker(config=(folder / "mosquitto.conf").read_text(), extra_config=extra_config)

    def show(self, folder, files):
        """Make ``files`` the broker's certificate and key."""
        (folder / "broker.crt").write_bytes(files["cert"].read_bytes())
        (folder / "broker.key").write_bytes(files["key"].read_bytes())

    def with_passwords(self, folder, logins, *, tls=False):
        write_broker_config(folder, fleet="f", tls=tls, passwords=True)
        set_passwords(folder / "passwords", logins)
        with (folder / "acl").open("a") as acl:
            acl.write(MUTE)
        return MosquittoBroker(config=(folder / "mosquitto.conf").read_text())

    def shown(self, who):
        """The arguments of Credentials by which a peer is known, or is not."""
        issue = self.authority.issue
        match who:
            case "nothing":
                return {}
            case "the authority":
                return {"ca": self.ca}
            case "one of another authority":
                return {"ca": self.ca, **self.stranger.issue("one")}
            case "one, expired":
                return {"ca": self.ca, **issue("one", valid=EXPIRED)}
            case "one, not yet valid":
                return {"ca": self.ca, **issue("one", valid=NOT_YET)}
            case "no name":
                return {"ca": self.ca, **issue(None, "host.example")}
            case "a wrong password":
                return {"username": "one", "password": "2"}
            case "the authority and a wrong password":
                return {"ca": self.ca, "username": "one", "password": "2"}
            case "a login alone":
                return {"username": "one", "password": "1"}
            case "an unknown user":
                return {"username": "three", "password": "1"}
        return {"ca": self.ca, **issue(who)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ExitStack() as brokers:
        yield World(tmp_path_factory.mktemp("world"), brokers)


@pytest.fixture
def command(tmp_path, capsys, norm):
    """Runs a command to its end; returns its status and what it says on stderr."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    norm.write(tmp_path / "model.edge")
    save_npz(tmp_path / "data.npz", quadrants(24))
    least = {
        "device": {"data": tmp_path / "data.npz", "id": "one", "join-timeout": 2},
        "serve": {"bundle": tmp_path / "model.edge", "rounds": 1, "participants": 1},
    }

    def run(name, url, *, password=None, **options):
        if password is not None:
            (tmp_path / "password").write_text(f"{password}\n")
            options["password-file"] = tmp_path / "password"
        given = {"broker": url, "fleet": "f", "work-dir": tmp_path / name, **least[name], **options}
        status = main([name, *(f"--{option}={value}" for option, value in given.items())])
        return status, capsys.readouterr().err.splitlines()

    yield run
    for number, handler in kept.items():
        signal.signal(number, handler)


class Round:
    """A run of one round in threads."""

    def __init__(self, folder, url, bundle, shown, *, devices):
        self.folder, self.url, self._ends = folder, url, []
        config = RunConfig(
            fleet="f", rounds=1, participants=devices, min_devices=devices, batch_size=8, evaluation="none"
        )
        server = Server(
            bundle, config, broker=url, work_dir=folder / "server", credentials=Credentials(**shown)
        )
        self.server = self._start(server.run, server.stop)

    def device(self, shown, device_id=None):
        """Start a device; returns its client and its thread."""
        client = EdgeClient(
            self.url,
            fleet="f",
            data=quadrants(24),
            work_dir=self.folder / f"device-{len(self._ends)}",
            device_id=device_id,
            engine=Engine(threads=1),
            credentials=Credentials(**shown),
        )
        return client, self._start(client.run, client.close)

    def _start(self, work, stop):
        thread = Thread(work)
        self._ends.append((stop, thread))
        return thread

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for stop, thread in self._ends:
            stop()
            thread.join(30)


def test_a_round_goes_over_tls_by_the_brokers_authority_alone(tmp_path, world, norm):
    url = world.broker("good").url
    assert url.startswith("mqtts://")
    with Round(tmp_path, url, norm, {"ca": world.ca}, devices=1) as run:
        _, device = run.device({"ca": world.ca}, "one")
        assert device.result() == 1
        assert run.server.result().finished


@pytest.mark.parametrize("kind", ["mutual", "mutual, TLS 1.2"])
def test_a_round_goes_over_mutual_tls_and_the_acl_of_common_names(tmp_path, world, norm, kind):
    with Round(tmp_path, world.broker(kind).url, norm, world.shown(SERVER), devices=2) as run:
        devices = [run.device(world.shown(name), name)[1] for name in ("one", "two")]
        assert [device.result() for device in devices] == [1, 1]
        assert run.server.result().finished


@pytest.mark.parametrize(("kind", "scheme"), [("with passwords", "mqtt:"), ("TLS with passwords", "mqtts:")])
def test_a_round_goes_over_passwords_and_a_devices_login_is_its_id(tmp_path, world, norm, kind, scheme):
    url, ca = world.broker(kind).url, {"ca": world.ca} if scheme == "mqtts:" else {}
    assert url.startswith(scheme)
    with Round(tmp_path, url, norm, {**ca, "username": SERVER, "password": "s"}, devices=1) as run:
        client, device = run.device({**ca, "username": "one", "password": "1"})
        assert device.result() == 1
        assert client.device_id == "one"


REFUSED = [
    ("expired", "the authority", "cannot be trusted: its certificate has expired: renew it"),
    ("not yet valid", "the authority", "its certificate is not valid yet: set this machine's clock"),
    ("of another host", "the authority", "its certificate is for another host: write a name"),
    (
        "of another authority",
        "the authority",
        "is of an unknown authority: give the one that has signed it (--ca)",
    ),
    ("good", "nothing", "is of an unknown authority: give the one that has signed it (--ca)"),
    ("mutual", "no name", "takes no user of the common name in --cert"),
    ("with passwords", "a wrong password", "check user 'one' and the password (--username, --password-file)"),
    ("with passwords", "an unknown user", "check user 'three' and the password"),
    ("with passwords", "nothing", "it wants a login: give --username and --password-file"),
    ("TLS with passwords", "the authority and a wrong password", "check user 'one' and the password"),
    ("TLS with passwords", "the authority", "it wants a login: give --username and --password-file"),
    ("TLS with passwords", "one", "it takes no user of the common name in --cert, or wants a login too"),
    ("TLS with passwords", "a login alone", "give the one that has signed it (--ca)"),
    *(
        (kind, who, reason)
        for kind in ("mutual", "mutual, TLS 1.2")
        for who, reason in (
            ("the authority", "it wants a certificate"),
            (
                "one of another authority",
                "(--cert) is of an authority that the broker does not know: have one",
            ),
            ("one, expired", "the certificate of this peer (--cert) has expired: have a new one issued"),
            ("one, not yet valid", "or not valid yet by the broker's clock: check both"),
        )
    ),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["device", "serve"])
@pytest.mark.parametrize(
    ("kind", "who", "reason"), REFUSED, ids=[f"{kind}, {who}" for kind, who, _ in REFUSED]
)
def test_who_is_refused_ends_with_one_line_of_cause_and_fix(world, command, name, kind, who, reason):
    broker = world.broker(kind)
    status, said = command(name, broker.url, **world.shown(who))
    assert status == 2
    (line,) = said
    assert line.startswith(f"edge-sdk: the broker at 127.0.0.1:{broker.port} ")
    assert reason in line


@pytest.mark.parametrize(
    ("kind", "scheme", "reason"),
    [
        ("good", "mqtt", "is this its port for TLS, mqtts://?"),
        ("plain", "mqtts", "is this its port for TLS?"),
    ],
)
def test_a_port_of_the_other_kind_is_named(world, command, kind, scheme, reason):
    status, said = command("device", f"{scheme}://127.0.0.1:{world.broker(kind).port}")
    assert status == 2
    assert reason in said[0]


def encrypted(file):
    key = load_pem_private_key(file.read_bytes(), None)
    scheme = BestAvailableEncryption(b"secret")
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, scheme))


def test_files_of_no_use_are_refused_before_the_broker_is_asked(world, tmp_path):
    url, one, two = "mqtts://host.invalid", world.authority.issue("one"), world.authority.issue("two")
    locked = world.authority.issue("locked")
    encrypted(locked["key"])
    for shown, reason in (
        ({"ca": one["key"]}, "is no certificate authority in PEM"),
        ({"key": one["key"]}, "give --cert too"),
        ({"cert": one["cert"], "key": two["key"]}, "check --cert and --key"),
        ({"cert": tmp_path / "none.crt", "key": one["key"]}, "No such file"),
        (locked, "is encrypted"),
    ):
        with pytest.raises(BrokerError, match=reason):
            MqttTransport(url, credentials=Credentials(**shown))


@pytest.mark.parametrize("who", ["the authority", "one"])
def test_certificates_are_not_forgotten_over_a_url_without_tls(world, who):
    with pytest.raises(BrokerError, match="write mqtts://"):
        MqttTransport("mqtt://127.0.0.1", credentials=Credentials(**world.shown(who)))


def test_a_join_that_the_acl_forbids_ends_with_a_word_of_the_acl(tmp_path, world, command, norm):
    url = world.broker("with passwords").url
    with Round(tmp_path, url, norm, {"username": SERVER, "password": "s"}, devices=1) as run:
        status, said = command("device", url, id="mute", username="mute", password="m")
        assert status == 2
        assert "does the broker's ACL let this device write …/up/mute/+ and read …/down/mute/+?" in said[-1]
        _, device = run.device({"username": "one", "password": "1"})
        assert device.result() == 1


@pytest.mark.parametrize("kind", ["with passwords", "mutual"])
def test_an_id_that_is_not_the_login_ends_with_a_word_of_the_acl(world, command, kind):
    shown = world.shown("one") if kind == "mutual" else {"username": "one", "password": "1"}
    status, said = command("device", world.broker(kind).url, **{**shown, "id": "two"})
    assert status == 2
    assert "does the broker's ACL let this device write …/up/two/+ and read …/down/two/+?" in said[-1]


@pytest.fixture
def device_of(tmp_path):
    """Runs a device; returns its thread when its join has been heard."""
    clients = []

    def start(broker, server, shown):
        watcher = MqttTransport(broker.url, credentials=Credentials(**server))
        watcher.connect(None, timeout=10)
        watcher.subscribe(TOPICS.up("one", "join"))
        client = EdgeClient(
            broker.url,
            fleet="f",
            data=quadrants(8),
            work_dir=tmp_path / "one",
            device_id="one",
            credentials=Credentials(**shown),
        )
        clients.append(client)
        thread = Thread(client.run)
        until(lambda: isinstance(watcher.receive(0.2), Received))
        watcher.close()
        return thread

    yield start
    for client in clients:
        client.close()


def test_a_device_whose_certificate_is_refused_after_a_restart_ends(tmp_path, world, device_of):
    with world.mutual(tmp_path / "broker") as broker:
        device = device_of(broker, world.shown(SERVER), world.shown("one"))
        broker.stop()
        (tmp_path / "broker" / "ca.crt").write_bytes(world.stranger.file.read_bytes())
        broker.start()
        with pytest.raises(
            BrokerError, match=r"refuses this device: .* authority that the broker does not know"
        ):
            device.result()


def test_a_device_whose_password_is_refused_after_a_restart_ends(tmp_path, world, device_of):
    logins = {SERVER: "s", "one": "1"}
    with world.with_passwords(tmp_path / "broker", logins) as broker:
        server, one = ({"username": user, "password": password} for user, password in logins.items())
        device = device_of(broker, server, one)
        broker.stop()
        set_passwords(tmp_path / "broker" / "passwords", {**logins, "one": "new"})
        broker.start()
        with pytest.raises(BrokerError, match=r"refuses this device: .*check user 'one'"):
            device.result()


def test_a_broker_whose_certificate_expires_is_left_with_a_word_until_it_is_renewed(tmp_path, world):
    folder = tmp_path / "broker"
    with world.mutual(folder) as broker:
        peer = MqttTransport(broker.url, credentials=Credentials(**world.shown("one")))
        peer.connect(None, timeout=10)
        heard = []

        def hears(kind, text=""):
            heard.append(peer.receive(0.2))
            return isinstance(heard[-1], kind) and text in str(heard[-1])

        until(lambda: hears(Connected))
        for valid, kind, text in (
            (EXPIRED, Disconnected, "its certificate has expired"),
            (None, Connected, ""),
        ):
            broker.stop()
            options = {"valid": valid} if valid else {}
            world.show(folder, world.authority.issue("broker", "127.0.0.1", **options))
            broker.start()
            until(lambda kind=kind, text=text: hears(kind, text))
        assert not any(event.fatal for event in heard if isinstance(event, Disconnected))
        peer.close()
