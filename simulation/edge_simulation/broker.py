"""MQTT brokers of one's own: amqtt in a process beside the demo, and a real mosquitto for tests.

``python -m edge_simulation.broker --port N`` runs the first.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from edge_sdk.errors import EdgeError
from edge_simulation import child

HOST = "127.0.0.1"
START_SECONDS = 30.0
STOP_SECONDS = 5.0
_READY = "ready"
_IN_USE = "in use"
_Self = TypeVar("_Self", bound="_Broker")


class _Broker:
    """A broker on the loopback interface, which is up inside its ``with`` block."""

    port: int
    _scheme = "mqtt"

    @property
    def url(self) -> str:
        """``mqtt://127.0.0.1:PORT``, or ``mqtts://`` where it speaks TLS."""
        return f"{self._scheme}://{HOST}:{self.port}"

    def start(self) -> None:
        """Start the broker and return once it accepts connections."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the broker, within a few seconds; more than once does no harm."""
        raise NotImplementedError

    def __enter__(self: _Self) -> _Self:
        try:
            self.start()
        except BaseException:  # Ctrl-C while it starts: nothing is left running
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EmbeddedBroker(_Broker):
    """amqtt (MQTT 3.1.1) in a process of its own, for a demo on a machine that has no broker.

    Anyone on this machine may connect. It ends with the ``with`` block and with the process that started
    it, however that one ends; nothing outlives it, retained messages neither.

    Args:
        port: 0 picks a free one, which ``port`` tells after the start.

    Raises:
        EdgeError: on the start: the port is in use, or the broker is not up within 30 seconds.
    """

    def __init__(self, port: int = 0) -> None:
        self.port = _checked(port)
        self._pick = port == 0
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the process and return once it accepts connections.

        Raises:
            EdgeError: the port is in use, or the broker is not up within 30 seconds.
        """
        # A port that was free a moment ago may be somebody else's by now.
        for _ in range(3 if self._pick else 1):
            self.port = _free_port() if self._pick else self.port
            answer = self._spawn()
            if answer == _READY:
                return
            self.close()
            if answer != _IN_USE:
                raise EdgeError(
                    f"the broker did not start on port {self.port}: {answer or 'no answer in time'}"
                )
        raise _in_use(self.port)

    def close(self) -> None:
        """Stop the process, within a few seconds; more than once does no harm."""
        if self._process is None:
            return
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _spawn(self) -> str:
        process = subprocess.Popen(
            child.command(sys.executable, "edge_simulation.broker", ["--port", str(self.port)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._process = process
        assert process.stdout is not None
        deadline = threading.Timer(START_SECONDS, process.kill)
        deadline.start()
        try:
            return process.stdout.readline().strip()
        finally:
            deadline.cancel()


class MosquittoBroker(_Broker):
    """A real mosquitto, for tests: persistent, in a temporary folder, and it can go away and come back.

    Args:
        port: 0 picks a free one and keeps it over restarts.
        extra_config: lines added to the end of mosquitto.conf, about the listener too: with a ``certfile``
            it speaks TLS.
        config: the text of a mosquitto.conf to run in place of one that lets anyone in and remembers; only
            its listener is moved here.

    Raises:
        EdgeError: mosquitto is not installed; on the start: the port is in use, or it refuses its
            configuration.
    """

    def __init__(self, port: int = 0, extra_config: str = "", *, config: str | None = None) -> None:
        binary = shutil.which("mosquitto") or shutil.which("/usr/sbin/mosquitto")
        if binary is None:
            raise EdgeError("mosquitto is not installed: apt-get install mosquitto")
        self._binary = binary
        self.port = _checked(port) or _free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="edge-mosquitto-")
        self.folder = Path(self._folder.name)
        listener = f"listener {self.port} {HOST}"
        remembers = f"persistence true\npersistence_location {self.folder}/"
        lines = ["log_dest stderr", "log_type error", "log_type warning"]
        # Started by root it would change to a user that cannot write to the folder.
        if os.name == "posix" and os.geteuid() == 0:
            lines.append("user root")
        if config is None:
            lines += [remembers, listener, "allow_anonymous true"]
        else:
            lines.append(re.sub(r"^listener .*$", listener, config, flags=re.MULTILINE))
        text = "\n".join([*lines, extra_config, ""])
        (self.folder / "mosquitto.conf").write_text(text)
        self._scheme = "mqtts" if re.search(r"^certfile ", text, re.MULTILINE) else "mqtt"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """Errors and warnings of all starts so far."""
        path = self.folder / "mosquitto.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pid(self) -> int:
        """Its process, to be stopped and continued by signals; 0 while it is away."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start it, for the first time or again, and return once it accepts connections.

        Raises:
            EdgeError: the port is in use, or mosquitto refuses its configuration.
        """
        if self._process is not None:
            return
        _check_free(self.port)
        with (self.folder / "mosquitto.log").open("ab") as log:
            # In a session of its own: a Ctrl-C is the parent's to handle.
            process = subprocess.Popen(
                [self._binary, "-c", str(self.folder / "mosquitto.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = process
        deadline = time.monotonic() + START_SECONDS
        while not _accepts(self.port):
            if process.poll() is not None or time.monotonic() > deadline:
                self.stop(kill=True)
                reason = " ".join(self.log.split("\n")[-3:]).strip() or "it did not answer in time"
                raise EdgeError(f"mosquitto did not start on port {self.port}: {reason}")
            time.sleep(0.02)

    def stop(self, *, kill: bool = False) -> None:
        """Stop it so that :meth:`start` can bring it back with its retained messages.

        Args:
            kill: end it as a crash would, without writing its state.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        (process.kill if kill else process.terminate)()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop it and remove its folder; more than once does no harm."""
        self.stop()
        self._folder.cleanup()


def main(arguments: list[str] | None = None) -> int:
    """Run amqtt for ever; the first line printed says how the start went."""
    parser = argparse.ArgumentParser(prog="python -m edge_simulation.broker")
    parser.add_argument("--port", type=int, default=1883)
    port = parser.parse_args(arguments).port
    # Ctrl-C reaches the whole process group; the parent needs the broker while it says goodbye.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    return asyncio.run(_serve(port))


async def _serve(port: int) -> int:
    from amqtt.broker import Broker
    from amqtt.session import Session

    class Selective(Broker):
        # amqtt greets every new client with the retained messages of everybody's subscriptions, whole
        # models among them, and trips over a subscription that changes meanwhile.
        async def _publish_retained_messages_for_subscription(
            self, subscription: tuple[str, int], session: Session
        ) -> None:
            subscribers = self._subscriptions.get(subscription[0], [])
            if any(other.client_id == session.client_id for other, _ in subscribers):
                await super()._publish_retained_messages_for_subscription(subscription, session)

    broker = Selective(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{HOST}:{port}"}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    try:
        await broker.start()
    except Exception as error:
        cause = error.__cause__ or error
        print(_IN_USE if getattr(cause, "errno", None) == errno.EADDRINUSE else cause, flush=True)
        return 1
    print(_READY, flush=True)
    # There is no state to save, and an orderly shutdown would wait for every client.
    await asyncio.Event().wait()
    return 0


def _checked(port: int) -> int:
    if not 0 <= port <= 65535:
        raise EdgeError(f"port {port} does not exist: choose one from 1 to 65535 with --port")
    return port


def _in_use(port: int) -> EdgeError:
    return EdgeError(f"port {port} is in use: choose another with --port")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        # Connections of a broker that has just stopped linger and are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _in_use(port) from None
            raise EdgeError(f"port {port} cannot be used ({error.strerror}): choose another") from None


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
