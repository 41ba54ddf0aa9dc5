"""Odd names of fleets and devices end a command before they enter a topic or a path."""

import pytest
from quadrants import quadrants

from edge_sdk import EdgeClient
from edge_sdk.cli import main
from edge_sdk.data import save_npz
from edge_sdk.errors import ProtocolError
from edge_sdk.transport import Credentials

ODD = ["", "#", "+", "a/b", "../up", "..", "a..b", ".a", "$SYS", "a\nb", "a\0b", "a b", '"a"', "a" * 65, "ａ"]
NOWHERE = "mqtt://127.0.0.1:9"


@pytest.fixture
def home(tmp_path, monkeypatch, norm):
    """A folder in which commands run and keep their state, with what they need."""
    norm.write(tmp_path / "model.edge")
    save_npz(tmp_path / "data.npz", quadrants(8))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def refused(capsys, home, *arguments):
    """The line with which a command is refused that has left nothing behind."""
    before = set(home.rglob("*"))
    assert main(arguments) == 2
    assert set(home.rglob("*")) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


DEVICE = ("device", "--data=data.npz", f"--broker={NOWHERE}")
SERVE = ("serve", "--bundle=model.edge", "--participants=1", "--rounds=1", f"--broker={NOWHERE}")


@pytest.mark.parametrize("name", ODD)
def test_an_odd_fleet_or_id_leaves_nothing_behind(capsys, home, name):
    assert "fleet" in refused(capsys, home, *DEVICE, f"--fleet={name}")
    assert "device id" in refused(capsys, home, *DEVICE, "--fleet=f", f"--id={name}")
    assert "fleet" in refused(capsys, home, *SERVE, f"--fleet={name}")


def test_an_odd_fleet_in_the_file_of_settings_leaves_nothing_behind(capsys, home):
    (home / "run.toml").write_text('fleet = "../f"')
    assert "fleet" in refused(capsys, home, *SERVE, "--config=run.toml")


@pytest.mark.parametrize("login", ["one@example.org", "one/join", "+", "one\n"])
def test_a_login_that_is_no_id_is_refused(home, login):
    with pytest.raises(ProtocolError, match="device id"):
        EdgeClient(
            NOWHERE,
            fleet="f",
            data=quadrants(8),
            work_dir=home / "device",
            credentials=Credentials(username=login, password="p"),
        )


def test_an_id_that_was_tampered_with_on_disk_is_refused(home):
    make = lambda: EdgeClient(NOWHERE, fleet="f", data=quadrants(8), work_dir=home / "d")  # noqa: E731
    make().close()
    (home / "d" / "id").write_text("+/join\n../x")
    with pytest.raises(ProtocolError, match="device id"):
        make()
