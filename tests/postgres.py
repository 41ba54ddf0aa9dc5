"""A PostgreSQL of the tests' own: a cluster in a temporary folder, and a new database for whoever asks."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from itertools import count
from pathlib import Path

import psycopg
from waiting import until

HOST = "127.0.0.1"
MISSING = "postgresql is not installed: make postgresql, or apt-get install postgresql"


def _binary(name):
    newest_first = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = shutil.which(name) or next(iter(newest_first), None)
    assert found is not None, MISSING
    return str(found)


class Postgres:
    """Up inside its ``with`` block; it can go away and come back."""

    def __init__(self):
        self._bin = _binary("postgres")
        self._folder = Path(tempfile.mkdtemp(prefix="edge-postgres-"))
        # It refuses to run as root.
        self._user = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(self._folder, "nobody", pwd.getpwnam("nobody").pw_gid)
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        self._names = count()
        self._process = None

    def __enter__(self):
        # A locale that sorts otherwise than by bytes, as most databases have.
        self._run(_binary("initdb"), "-U", "edge", "--auth=trust", "-N", "-E", "UTF8", *_LOCALE)
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self):
        options = ("-p", str(self.port), "-h", HOST, "-k", str(self._folder), "-c", "fsync=off")
        self._process = subprocess.Popen(
            [self._bin, "-D", str(self._folder / "data"), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            start_new_session=True,
            **self._user,
        )
        until(self._answers, 60, "PostgreSQL")

    def stop(self):
        """End it as an administrator who does not wait for sessions."""
        if self._process is not None:
            self._process.send_signal(2)
            self._process.wait(30)
            self._process = None

    def database(self):
        """The URL of a new, empty database."""
        name = f"edge{next(self._names)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, name):
        return f"postgresql://edge@{HOST}:{self.port}/{name}"

    def execute(self, statement, name="postgres"):
        with psycopg.connect(self.url(name), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None

    def _answers(self):
        try:
            return self.execute("SELECT 1")
        except psycopg.OperationalError:
            assert self._process.poll() is None, "PostgreSQL has ended at its start"
            return None

    def _run(self, *command):
        data = ("-D", str(self._folder / "data"))
        done = subprocess.run(
            [*command, *data], capture_output=True, text=True, cwd=self._folder, check=False, **self._user
        )
        assert done.returncode == 0, done.stderr


_LOCALE = ("--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US")
