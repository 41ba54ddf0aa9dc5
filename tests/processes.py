"""The commands ``edge-sdk serve`` and ``edge-sdk device`` as real processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from quadrants import quadrants
from waiting import until

from edge_sdk.data import save_npz

COMMAND = Path(sys.executable).with_name("edge-sdk")


class Process:
    """One running command; its lines are there as they come."""

    def __init__(self, *arguments, cwd):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [COMMAND, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
        self.out, self.err = [], []
        self._readers = [
            threading.Thread(target=lines.extend, args=(map(str.rstrip, pipe),), daemon=True)
            for lines, pipe in ((self.out, self._process.stdout), (self.err, self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, seconds=60):
        """The exit status, after every line has been read."""
        code = self._process.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return code

    def says(self, text, seconds=60):
        """Wait until a line on either stream holds ``text``."""

        def said():
            return any(text in line for line in [*self.out, *self.err]) or self._process.poll() is not None

        until(said, seconds, text)
        assert any(text in line for line in [*self.out, *self.err]), (text, self.out, self.err)

    @property
    def pid(self):
        return self._process.pid

    def signal(self, number):
        self._process.send_signal(number)

    def interrupt(self):
        self.signal(signal.SIGINT)

    def kill(self):
        """End the process as a power cut does."""
        self._process.kill()
        self._process.wait(10)

    @property
    def running(self):
        return self._process.poll() is None

    def errors(self):
        """The lines in which the command says why it ends."""
        assert not any("Traceback" in line for line in self.err), self.err
        return [line for line in self.err if line.startswith("edge-sdk: ")]


class Machine:
    """A folder with everything that one fleet of processes needs, on one broker."""

    def __init__(self, folder, url):
        self.folder, self.url = folder, url
        self._started = []

    def run(self, *arguments):
        process = Process(*arguments, cwd=self.folder)
        self._started.append(process)
        return process

    def serve(self, *options):
        least = ("--bundle", "model.edge", "--broker", self.url, "--fleet", "p", "--work-dir", "server")
        return self.run("serve", *least, "--batch-size", "8", *options)

    def device(self, name, *options, data="data.npz", work_dir=None):
        least = ("--broker", self.url, "--fleet", "p", "--id", name, "--data", data, "--threads", "1")
        return self.run("device", *least, "--work-dir", work_dir or f"devices/{name}", *options)

    def close(self):
        for process in self._started:
            if process.running:
                process.kill()


def machine_in(folder, bundle, url=""):
    """A machine with a bundle and a device's data, by the names that its commands have for them."""
    folder.mkdir(exist_ok=True)
    bundle.write(folder / "model.edge")
    save_npz(folder / "data.npz", quadrants(24))
    return Machine(folder, url)
