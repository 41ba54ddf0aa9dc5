"""A server that is killed at a commit of its choice, started again until its run ends, and its devices."""

import multiprocessing
import os
import signal
import sys
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count

from fleets import Thread

from edge_sdk import EdgeClient, Engine
from edge_sdk.errors import RunError
from edge_server import Server, coordinator, fleet
from edge_server.database import Database
from edge_server.store import Store

# Forked from a process without threads, a server is up at once.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["pytest", "crashing", "edge_server.calibration", "edge_server.grouping"])


KILLED, HAS_ENDED = -signal.SIGKILL, 77
"""Exit statuses of a server."""


@dataclass(frozen=True)
class Crash:
    """Where a server is killed: right before or right after its ``commit``-th commit, from 1."""

    commit: int
    after: bool


@dataclass(frozen=True)
class Snapshot:
    """What the store says of the runs in it."""

    runs: list[str]
    ended: bool
    round: int
    attempts: list[tuple[int, int, str]]


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(crash):
    transaction, begun = Database.transaction, count(1)

    @contextmanager
    def fatal(database):
        mine = next(begun) == crash.commit
        with transaction(database) as connection:
            yield connection
            if mine and not crash.after:
                _die()
        if mine:
            _die()

    Database.transaction = fatal


def _serve(bundle, config, broker, folder, url, crash):
    # Devices need not spread their answers: they are few.
    fleet.JITTER = coordinator.JITTER = 0
    if crash is not None:
        _arm(crash)
    try:
        Server(bundle, config, broker=broker, work_dir=folder / "server", store=url).run()
    except RunError as error:
        sys.exit(HAS_ENDED if "has ended" in str(error) else str(error))


def serve(bundle, config, *, broker, folder, url=None, crash=None, seconds=120):
    """Run the server in a process of its own; its exit status, which is one of three."""
    process = _processes.Process(target=_serve, args=(bundle, config, broker, folder, url, crash))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode in (0, KILLED, HAS_ENDED), f"exit status {process.exitcode} at {crash}"
    return process.exitcode


@contextmanager
def devices(data, *, fleet, broker, folder, **options):
    """A device for each name in ``data``; all have seen the end of the run when the block ends well."""
    clients = [
        EdgeClient(
            broker,
            fleet=fleet,
            data=mine,
            work_dir=folder / name,
            device_id=name,
            engine=Engine(threads=1),
            **options,
        )
        for name, mine in data.items()
    ]
    threads = [Thread(client.run) for client in clients]
    try:
        yield
        for thread in threads:
            thread.result()
    finally:
        for client in clients:
            client.stop()


def look(folder, url=None):
    """The present :class:`Snapshot`."""
    try:
        store = Store(folder / "server", url, exclusive=False)
    except RunError:
        return Snapshot([], False, 0, [])
    with closing(store):
        runs = store.runs()
        if not runs:
            return Snapshot([], False, 0, [])
        attempts = [(row.round, row.attempt, row.kind) for row in store.rounds(runs[-1].id)]
        return Snapshot([run.id for run in runs], runs[-1].ended, runs[-1].round, attempts)


def run_through(bundle, config, data, crashes, *, broker, folder, url=None, **options):
    """Run to the end, with a crash at each of ``crashes``, start by start; returns how many there were.

    After each start the store has the run and the rounds that it had before. A run that has ended when its
    server is killed is not run again.
    """
    folder.mkdir()
    bundle.write(folder / "model.edge")
    before = Snapshot([], False, 0, [])
    with devices(data, fleet=config.fleet, broker=broker, folder=folder, **options):
        for start, crash in enumerate([*crashes, None]):
            status = serve(folder / "model.edge", config, broker=broker, folder=folder, url=url, crash=crash)
            after = look(folder, url)
            assert after.runs[: len(before.runs)] == before.runs
            assert len(after.runs) <= 1
            assert after.round >= before.round
            assert after.attempts[: len(before.attempts)] == before.attempts
            assert (status == HAS_ENDED) == before.ended
            if status != KILLED:
                return start
            before = after
    raise AssertionError("not over")
