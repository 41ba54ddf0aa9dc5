"""A fleet on one machine: every device a process of its own, with its own data and work folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from edge_sdk.data import ArrayDataset, save_npz
from edge_sdk.errors import EdgeError
from edge_simulation import child

STOP_SECONDS = 3.0
INTERRUPTED = 130


class DeviceProcesses:
    """Starts ``edge-sdk device`` once a share, and ends what it has started.

    Args:
        shares: the labelled images of each device.
        names: their ids.
        broker: URL of the broker.
        fleet: the fleet's name.
        folder: for data, work folders and logs.
        runtime: of the devices.
        share: what else than updates may leave them, as ``edge-sdk device --share`` takes it; every class
            counts, however few examples it has.
        python: the interpreter to start them with; another environment needs only ``edge-sdk-fl[onnx]``.
    """

    def __init__(
        self,
        shares: Sequence[ArrayDataset],
        names: Sequence[str],
        *,
        broker: str,
        fleet: str,
        folder: Path,
        runtime: str = "onnx",
        share: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        self._shares = dict(zip(names, shares, strict=True))
        self._broker = broker
        self._fleet = fleet
        self._folder = folder
        self._runtime = runtime
        self._share = ["--share", ",".join(share), "--withhold-below", "0"] if share else []
        self._python = python
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> DeviceProcesses:
        try:
            for name in self._shares:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, name: str) -> None:
        """Start one device, or start it again: its work folder is where it left it."""
        folder = self._folder / name
        data = folder / "data.npz"
        if not data.exists():
            save_npz(data, self._shares[name])
        arguments = ["device", "--broker", self._broker, "--fleet", self._fleet, "--id", name]
        arguments += ["--data", str(data), "--work-dir", str(folder / "work")]
        arguments += ["--threads", "1", "--runtime", self._runtime, *self._share]
        with (folder / "log").open("ab") as log:
            # One thread for NumPy too: the devices share the machine's cores.
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            self._processes[name] = subprocess.Popen(
                child.command(self._python, "edge_sdk.cli", arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def kill(self, name: str) -> None:
        """End one device as a power cut does."""
        self._processes[name].kill()
        self._processes[name].wait(STOP_SECONDS)

    def check(self) -> None:
        """Raise EdgeError with the last words of a device that has ended in failure."""
        for name, process in self._processes.items():
            status = process.poll() or 0
            # Ctrl-C reaches the devices too, and a killed one is for the server to do without.
            if status > 0 and status != INTERRUPTED:
                raise EdgeError(f"device {name} ended with status {status}: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        """The last line of a device's log."""
        lines = (self._folder / name / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def wait(self, timeout: float) -> None:
        """Let the devices end by themselves, for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        for process in self._processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                return

    def close(self) -> None:
        """End all devices, at once."""
        for process in self._processes.values():
            process.terminate()
        self.wait(STOP_SECONDS)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
