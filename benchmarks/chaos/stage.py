"""A fleet of real processes, and what may be done to it; what ends in failure is started again."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from chaos.faults import FLEET_LOST, Fault
from chaos.material import shares
from edge_sdk.data import save_npz
from edge_sdk.errors import EdgeError
from edge_sdk.protocol.messages import Receipt, decode_from_server
from edge_simulation import child
from edge_simulation.broker import HOST, MosquittoBroker
from edge_simulation.proxy import Direction, Proxy, Rates

FLEET = "chaos"
CHUNK = 1000
"""Bytes from which on a message is taken for a part of a model or an update."""
TICK = 0.02
HELD = 1.0
"""Most seconds that a fault holds messages up to come before them."""
AGAIN = 0.5
"""Seconds after which a process that has failed is started again, as systemd would."""


@dataclass(slots=True)
class Service:
    """One command, kept running."""

    name: str
    arguments: list[str]
    folder: Path
    ends: Counter[str]
    """Last words of those of its processes that have ended in failure by themselves."""
    ended: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _down_until: float | None = 0.0
    """None while it is held down or stopped by a fault."""
    _stopped: bool = False

    @property
    def log(self) -> Path:
        """What all its processes have said."""
        return self.folder / f"{self.name}.log"

    @property
    def is_well(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None and not self._stopped

    def start(self) -> None:
        """Start the command."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._down_until, self._stopped = 0.0, False
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                child.command(sys.executable, "edge_sdk.cli", self.arguments),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
            )

    def look(self, now: float) -> None:
        """Note that it has ended; start it again if it has failed."""
        process = self._process
        if process is None or self.ended or self._down_until is None:
            return
        if self._down_until:
            if now >= self._down_until:
                self.start()
            return
        status = process.poll()
        if status == 0:
            self.ended = True
        elif status is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            self.ends[f"{self.name} ({status}): {lines[-1] if lines else 'it said nothing'}"] += 1
            self._down_until = now + AGAIN

    def kill(self) -> None:
        """End it as a power cut does; it stays down until :meth:`start`."""
        self._down_until = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Let it stand still, until :meth:`go_on`."""
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def go_on(self) -> None:
        """It was not dead."""
        self._signal(signal.SIGCONT)
        self._stopped = False

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@dataclass(slots=True)
class Stage:
    """Broker, proxy, server and devices inside a ``with`` block.

    Args:
        folder: for all that they write.
        bundle: file of what is trained.
        serve: further options of the server.
        device: further options of every device.
    """

    folder: Path
    bundle: Path
    devices: int
    serve: Sequence[str]
    device: Sequence[str]
    seed: int
    receipts: list[tuple[Direction, str, Receipt]] = field(default_factory=list, init=False)
    """Every receipt as it came from the server and as it went to its device, with the device's id."""
    ends: Counter[str] = field(default_factory=Counter, init=False)
    _done: Counter[str] = field(default_factory=Counter, init=False)
    server: Service = field(init=False)
    fleet: dict[str, Service] = field(default_factory=dict, init=False)
    proxy: Proxy = field(init=False)
    _broker: MosquittoBroker = field(init=False)
    _opened: ExitStack = field(init=False)
    _broker_is_well: bool = field(default=True, init=False)
    _upon: str = field(default="", init=False)
    _came: threading.Event = field(default_factory=threading.Event, init=False)
    _happened: threading.Event = field(default_factory=threading.Event, init=False)
    _hold: bool = field(default=False, init=False)
    _came_of: str = field(default="d0", init=False)
    _undo: list[tuple[float, str, Callable[[], None]]] = field(default_factory=list, init=False)
    """What ends the faults that are going on: when, of whom, how."""

    def __enter__(self) -> Stage:
        self.folder.mkdir(parents=True)
        with ExitStack() as opened:
            self._broker = _started(opened)
            opened.callback(self._resume_broker)
            proxy = Proxy(self._broker.url, seed=self.seed, on_publish=self._on_publish)
            self.proxy = opened.enter_context(proxy)
            reached = ["--broker", self.proxy.url, "--fleet", FLEET]
            serve = ["serve", *reached, "--bundle", str(self.bundle.resolve()), "--work-dir", "server"]
            serve += ["--keep-updates", "--batch-size", "8", *self.serve]
            self.server = Service("server", serve, self.folder, self.ends)
            for name, share in shares(self.devices).items():
                save_npz(self.folder / f"{name}.npz", share)
                device = ["device", *reached, "--id", name, "--data", f"{name}.npz"]
                device += ["--work-dir", f"{name}-work", "--threads", "1", *self.device]
                self.fleet[name] = Service(name, device, self.folder, self.ends)
            for service in self._services:
                opened.callback(service.kill)
                service.start()
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def _services(self) -> list[Service]:
        return [self.server, *self.fleet.values()]

    def wait(self, seconds: float, *, upon: str = "", hold: bool = False) -> bool:
        """Keep all running for ``seconds``, or until a message of kind ``upon`` passes if it is not empty.

        Args:
            hold: the message, and all others, pass only when the next fault has happened.

        Returns:
            True as soon as the server has ended well.
        """
        self._came.clear()
        self._upon, self._hold = upon, hold
        until = time.monotonic() + seconds
        while not self.server.ended and (now := time.monotonic()) < until:
            for entry in [entry for entry in self._undo if entry[0] <= now]:
                self._undo.remove(entry)
                entry[2]()
            for service in self._services:
                service.look(now)
            if self._came.wait(TICK) and upon:
                break
        self._upon = ""
        return self.server.ended

    def heal(self) -> None:
        """End all faults that are going on."""
        for _, _, undo in self._undo:
            undo()
        self._undo.clear()

    def befall(self, fault: Fault) -> None:
        """Let ``fault`` happen, if its victim is well; what it does is undone in time."""
        victim = self._came_of if fault.victim == "device" else fault.victim
        undo = self._do(fault.kind, victim, fault.lasts)
        if undo is not None:
            self._done[fault.kind] += 1
            self._undo.append((time.monotonic() + fault.lasts, victim, undo))
        self._happened.set()

    @property
    def done(self) -> Counter[str]:
        """How many faults have happened, by kind."""
        cuts = {
            "download cut": self.proxy.done["cut within down"],
            "upload cut": self.proxy.done["cut within up"],
        }
        return self._done + Counter(cuts)

    def _do(self, kind: str, victim: str, lasts: float) -> Callable[[], None] | None:
        """Begin a fault; what ends it, or None if it does not happen, or not now."""
        if kind == FLEET_LOST:
            return self._lose_fleet()
        if victim == "broker":
            return self._harm_broker(kind)
        if kind.startswith("messages"):
            return self._disturb(kind)
        client = f"edge-server-{FLEET}-" if victim == "server" else f"edge-{victim}-"
        if kind in ("download cut", "upload cut"):
            # It happens with the next chunk.
            self.proxy.cut_within(client, "up" if kind == "upload cut" else "down", at_least=CHUNK)
            return None
        service = self.server if victim == "server" else self.fleet[victim]
        if not service.is_well:
            return None
        if kind.endswith("killed"):
            service.kill()
            return service.start
        if kind.endswith("stopped"):
            service.stop()
            return service.go_on
        happens = self.proxy.cut(client) if kind == "link cut" else self.proxy.stall(lasts, client)
        return (lambda: None) if happens else None

    def _lose_fleet(self) -> Callable[[], None]:
        # Nobody comes back earlier from a fault of his own.
        self._undo = [entry for entry in self._undo if entry[1] not in self.fleet]
        for service in self.fleet.values():
            service.kill()

        def start() -> None:
            for service in self.fleet.values():
                service.start()

        return start

    def _harm_broker(self, kind: str) -> Callable[[], None] | None:
        if not self._broker_is_well:
            return None
        self._broker_is_well = False
        if kind == "broker stopped":
            os.kill(self._broker.pid, signal.SIGSTOP)
            return self._resume_broker
        self._broker.stop(kill=True)

        def start() -> None:
            self._broker.start()
            self._broker_is_well = True

        return start

    def _resume_broker(self) -> None:
        if self._broker.pid:
            os.kill(self._broker.pid, signal.SIGCONT)
        self._broker_is_well = True

    def _disturb(self, kind: str) -> Callable[[], None]:
        field_of = {"doubled": "duplicate", "reordered": "reorder", "delayed": "delay"}[kind.split()[1]]
        self.proxy.rates = replace(self.proxy.rates, **{field_of: 0.3})

        def end() -> None:
            self.proxy.rates = replace(self.proxy.rates, **{field_of: getattr(Rates(), field_of)})

        return end

    def _on_publish(self, client: str, direction: Direction, topic: str, payload: bytes) -> None:
        """In the proxy's thread."""
        device, kind = topic.split("/")[-2:]
        if "/model/" in topic:
            device, kind = client.removeprefix("edge-").rpartition("-")[0], "model"
        of_training = b'"kind":"' not in payload or b'"kind":"train"' in payload
        if kind == self._upon and device in self.fleet and of_training:
            self._came_of, self._upon = device, ""
            self._happened.clear()
            self._came.set()
            if self._hold:
                self._happened.wait(HELD)
        if kind == "receipt":
            receipt = decode_from_server("receipt", payload)
            assert isinstance(receipt, Receipt)
            self.receipts.append((direction, device, receipt))


def _started(opened: ExitStack) -> MosquittoBroker:
    """A broker; another trial may take the port in between."""
    for _ in range(4):
        with suppress(EdgeError):
            return opened.enter_context(MosquittoBroker(_port()))
    return opened.enter_context(MosquittoBroker(_port()))


def _port() -> int:
    """A free port, not one of those that connections get: nobody may take it while the broker is away."""
    while True:
        port = secrets.randbelow(10_000) + 20_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
