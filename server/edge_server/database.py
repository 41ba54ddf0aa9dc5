"""The database under the store: opened, held by one server a fleet, read, and written by that one alone."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa

from edge_sdk.errors import RunError
from edge_server.tables import SCHEMA, fleets, meta, tables

# Either side of a connection notices within half a minute that the other one is gone.
_POSTGRES = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
    "options": "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3",
}


class Database:
    """One database.

    A server holds its fleet: on PostgreSQL by an advisory lock of the one session that it writes in, and
    everywhere by an epoch that every transaction checks, so that a server whose place another has taken
    writes nothing more.

    Args:
        work_dir: made where it is missing; SQLite's file is there.
        url: an SQLAlchemy URL; None for SQLite.
        exclusive: for a server, who makes the tables and takes the folder; RunError if another has it.

    Raises:
        RunError: it cannot be opened, or is of another schema version.
    """

    def __init__(self, work_dir: Path, url: str | None, *, exclusive: bool) -> None:
        self._folder = _lock(work_dir) if exclusive else None
        self._engine: sa.Engine | None = None
        self._writer: sa.Connection | None = None
        self._fleet, self._epoch, self._lost = "", 0, False
        try:
            self._engine = _engine(url or f"sqlite:///{work_dir / 'edge.sqlite'}")
            self._prepare(exclusive)
        except (sa.exc.SQLAlchemyError, ModuleNotFoundError) as error:
            self.close()
            hint = ": pip install 'edge-sdk-fl[postgres]'" if "psycopg" in str(error) else ""
            raise RunError(f"the store cannot be opened: {_first_line(error)}{hint}") from None
        except RunError:
            self.close()
            raise

    def close(self) -> None:
        """Give everything back."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._engine is not None:
            # A session that went back to the pool would still have its lock.
            self._engine.dispose()
        if self._folder is not None:
            self._folder.close()

    def take(self, fleet: str) -> None:
        """Hold ``fleet`` from now on; RunError if another server does.

        Where a lock is not enough, because the sessions of the database or the network are not what they
        seem, the server that comes later wins: the other one's next transaction fails.
        """
        with self._explained("written"):
            self._writer = self._opened.connect()
            if self._opened.dialect.name == "postgresql":
                free = self._writer.execute(sa.select(sa.func.pg_try_advisory_lock(_key(fleet)))).scalar()
                self._writer.commit()
                if not free:
                    raise RunError(
                        f"another server serves fleet {fleet} with this database: stop it, or give --fleet"
                    )
            mine = fleets.c.name == fleet
            with self._writer.begin():
                later = sa.update(fleets).where(mine).values(epoch=fleets.c.epoch + 1)
                if not self._writer.execute(later).rowcount:
                    self._writer.execute(sa.insert(fleets).values(name=fleet, epoch=1))
                self._epoch = self._writer.execute(sa.select(fleets.c.epoch).where(mine)).scalar_one()
            self._fleet = fleet

    @contextlib.contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A connection to read with; RunError if that fails."""
        with self._explained("read"), self._opened.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """What is written in it is durable at its end, or nothing of it; RunError if that fails."""
        if self._writer is None or self._lost:
            raise RunError("the store is not held by this server: nothing can be written")
        with self._explained("written"), self._writer.begin():
            mine = sa.and_(fleets.c.name == self._fleet, fleets.c.epoch == self._epoch)
            # A write and no question: with it SQLite's transaction begins, and PostgreSQL locks the row.
            if not self._writer.execute(sa.update(fleets).where(mine).values(epoch=self._epoch)).rowcount:
                raise RunError(f"another server has taken fleet {self._fleet} over: this one ends")
            yield self._writer

    @property
    def _opened(self) -> sa.Engine:
        assert self._engine is not None
        return self._engine

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except sa.exc.SQLAlchemyError as error:
            reason = _first_line(error)
            if isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated:
                # A new session would write without the lock.
                self._lost = True
                raise RunError(
                    f"the store is lost ({reason}); nothing that was acknowledged is: the same command goes "
                    "on once the database is back"
                ) from None
            if done == "read":
                raise RunError(
                    f"the store cannot be read ({reason}): mend the database, then give the same command "
                    "again"
                ) from None
            raise RunError(
                f"the store cannot be written ({reason}); nothing is lost: free the disk or mend the "
                "database, then give the same command again"
            ) from None

    def _prepare(self, exclusive: bool) -> None:
        with self._opened.begin() as connection:
            if exclusive and self._opened.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_key(""))))
            made = not exclusive or sa.inspect(connection).has_table(meta.name)
            found = connection.execute(sa.select(meta.c.schema)).scalar() if made else None
            if found is None and exclusive:
                # Only a server makes the tables; a reader that did so would get in its way.
                tables.create_all(connection)
                connection.execute(sa.insert(meta).values(schema=SCHEMA))
            elif found != SCHEMA:
                raise RunError(
                    f"the store has schema {found}, this server reads {SCHEMA}: use a new --work-dir"
                )


def _engine(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "postgresql":
        return sa.create_engine(parsed, connect_args=_POSTGRES | dict(parsed.query))
    engine = sa.create_engine(parsed)
    if engine.dialect.name == "sqlite":
        sa.event.listen(engine, "connect", _make_durable)
    return engine


def _key(fleet: str) -> int:
    """The number of a fleet's advisory lock: 64 bits with a sign."""
    return int.from_bytes(hashlib.sha256(f"edge-sdk/{fleet}".encode()).digest()[:8], "big", signed=True)


def _lock(work_dir: Path) -> IO[str]:
    """The lock of a work folder; RunError if another server has it."""
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        lock = (work_dir / "lock").open("a")
    except OSError as error:
        raise RunError(f"the work folder {work_dir} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise RunError(f"another server is running in {work_dir}: stop it, or give --work-dir") from None
    return lock


def _make_durable(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
