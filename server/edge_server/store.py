"""What a run must not forget, in one database: every transition is durable before it is acknowledged.

SQLite by default, PostgreSQL by URL. Models, states and updates are rows of the same database, so that
a transition and its bytes are there together or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import sqlalchemy as sa

from edge_sdk.errors import RunError
from edge_sdk.protocol.messages import Key as MessageKey
from edge_sdk.protocol.messages import Offer, Ref, Taken, key_of
from edge_sdk.tensors import sha256
from edge_server.config import RunConfig
from edge_server.rows import AcceptedResult, Key, RoundRow, RunRow, WorkKey

SCHEMA = 3

_tables = sa.MetaData()
_meta = sa.Table("meta", _tables, sa.Column("schema", sa.Integer, primary_key=True))
_blobs = sa.Table(
    "blobs",
    _tables,
    sa.Column("hash", sa.String(64), primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
_runs = sa.Table(
    "runs",
    _tables,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("fleet", sa.String(64), nullable=False, index=True),
    sa.Column("config", sa.LargeBinary, nullable=False),
    sa.Column("bundle", sa.String(64), nullable=False),
    sa.Column("model", sa.String(64), nullable=False),
    sa.Column("state", sa.String(64), nullable=False),
    sa.Column("round", sa.Integer, nullable=False, default=0),
    sa.Column("ended", sa.Boolean, nullable=False, default=False),
    sa.Column("multiples", sa.LargeBinary),
    sa.Column("created", sa.Float, nullable=False),
)
_rounds = sa.Table(
    "rounds",
    _tables,
    sa.Column("run", sa.String(32), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("wanted", sa.Integer, nullable=False),
    sa.Column("selected", sa.LargeBinary, nullable=False),
    sa.Column("chains", sa.LargeBinary, nullable=False),
    sa.Column("exponents", sa.LargeBinary, nullable=False),
    sa.Column("model_before", sa.String(64), nullable=False),
    sa.Column("model_after", sa.String(64)),
    sa.Column("figures", sa.LargeBinary),
    sa.Column("noise_seed", sa.LargeBinary),
)
_results = sa.Table(
    "results",
    _tables,
    sa.Column("run", sa.String(32), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("hop", sa.Integer, primary_key=True),
    sa.Column("device", sa.String(64), primary_key=True),
    sa.Column("counted", sa.Integer, nullable=False, index=True),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Column("examples", sa.BigInteger, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
)
_declared = sa.Table(
    "declared",
    _tables,
    sa.Column("run", sa.String(32), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("hop", sa.Integer, primary_key=True),
    sa.Column("device", sa.String(64), primary_key=True),
    sa.Column("examples", sa.BigInteger, nullable=False),
)
_published = sa.Table(
    "published",
    _tables,
    sa.Column("fleet", sa.String(64), primary_key=True),
    sa.Column("hash", sa.String(64), primary_key=True),
    sa.Column("ref", sa.LargeBinary, nullable=False),
)


class Store:
    """The durable state of all runs at one URL.

    Args:
        url: an SQLAlchemy URL; None for SQLite in ``work_dir``.
        work_dir: made where it is missing.
        exclusive: take the folder for one server; RunError if another has it.

    Raises:
        RunError: the database cannot be opened, or is of another schema version.
    """

    def __init__(self, work_dir: Path, url: str | None = None, *, exclusive: bool = True) -> None:
        self._lock = _take(work_dir) if exclusive else None
        try:
            self._engine = sa.create_engine(url or f"sqlite:///{work_dir / 'edge.sqlite'}")
            if self._engine.dialect.name == "sqlite":
                sa.event.listen(self._engine, "connect", _make_durable)
            # Only the one server makes the tables; a reader that did so would get in its way.
            if exclusive:
                _tables.create_all(self._engine)
            self._check_schema(exclusive)
        except (sa.exc.SQLAlchemyError, ModuleNotFoundError) as error:
            if self._lock is not None:
                self._lock.close()
            raise RunError(f"the store cannot be opened: {_first_line(error)}") from None
        except RunError:
            self.close()
            raise

    def close(self) -> None:
        """Close the database and give the folder back."""
        self._engine.dispose()
        if self._lock is not None:
            self._lock.close()

    def runs(self, fleet: str | None = None) -> list[RunRow]:
        """All runs, or a fleet's, the oldest first."""
        query = sa.select(_runs).order_by(_runs.c.created)
        if fleet is not None:
            query = query.where(_runs.c.fleet == fleet)
        with self._reading() as connection:
            return [_run_row(row) for row in connection.execute(query)]

    def get(self, run: str) -> RunRow:
        """One run; RunError if there is none."""
        with self._reading() as connection:
            row = connection.execute(sa.select(_runs).where(_runs.c.id == run)).first()
        if row is None:
            raise RunError(f"the store has no run {run}")
        return _run_row(row)

    def begin(self, config: RunConfig, bundle: bytes, model: bytes, state: bytes) -> RunRow:
        """Record a new run with its first model and state."""
        row = RunRow(
            id=secrets.token_hex(16),
            fleet=config.fleet,
            config=config,
            bundle=sha256(bundle),
            model=sha256(model),
            state=sha256(state),
            round=0,
            ended=False,
            created=time.time(),
        )
        with self._transaction() as connection:
            for data in (bundle, model, state):
                _put(connection, data)
            connection.execute(
                sa.insert(_runs).values(
                    id=row.id,
                    fleet=row.fleet,
                    config=msgspec.json.encode(config),
                    bundle=row.bundle,
                    model=row.model,
                    state=row.state,
                    created=row.created,
                )
            )
        return row

    def blob(self, digest: str) -> bytes:
        """The bytes of a blob; RunError if it is missing or damaged."""
        with self._reading() as connection:
            data = connection.execute(sa.select(_blobs.c.data).where(_blobs.c.hash == digest)).scalar()
        if data is None or sha256(data) != digest:
            raise RunError(f"the store has lost blob {digest[:12]}: restore it from a backup")
        return bytes(data)

    def open_round(self, row: RoundRow) -> None:
        """Record that a cohort is asked."""
        values = {
            "run": row.run,
            "round": row.round,
            "attempt": row.attempt,
            "kind": row.kind,
            "status": row.status,
            "wanted": row.wanted,
            "selected": msgspec.json.encode(row.selected),
            "chains": msgspec.json.encode(row.chains),
            "exponents": msgspec.json.encode(row.exponents),
            "model_before": row.model_before,
            "noise_seed": row.noise_seed,
        }
        with self._transaction() as connection:
            connection.execute(sa.insert(_rounds).values(values))

    def set_selected(self, row: RoundRow, selected: list[str]) -> None:
        """Record replacements."""
        with self._transaction() as connection:
            connection.execute(
                sa.update(_rounds).where(_is_row(row)).values(selected=msgspec.json.encode(selected))
            )

    def declare(self, device: str, taken: Taken) -> None:
        """Record how many examples a device said that it would use for a task; what it said first counts."""
        key = key_of(taken)
        with self._transaction() as connection:
            known = sa.select(_declared.c.examples).where(
                *(_declared.c[name] == value for name, value in key.items()), _declared.c.device == device
            )
            if taken.examples is not None and connection.execute(known).first() is None:
                values = {**key, "device": device, "examples": taken.examples}
                connection.execute(sa.insert(_declared).values(values))

    def declared(self, device: str, key: MessageKey) -> int | None:
        """What the device said under this key; None if nothing."""
        query = sa.select(_declared.c.examples).where(
            *(_declared.c[name] == value for name, value in key_of(key).items()), _declared.c.device == device
        )
        with self._reading() as connection:
            found = connection.execute(query).scalar()
            return None if found is None else int(found)

    def accept(self, device: str, offer: Offer, data: bytes, *, counted: int) -> None:
        """Record an accepted result with its bytes; the receipt may be sent after this.

        Args:
            counted: the round that it counts in.
        """
        with self._transaction() as connection:
            _put(connection, data)
            connection.execute(
                sa.insert(_results).values(
                    run=offer.run,
                    round=offer.round,
                    attempt=offer.attempt,
                    kind=offer.kind,
                    hop=offer.hop,
                    device=device,
                    counted=counted,
                    hash=offer.blob.hash,
                    examples=offer.examples,
                    size=offer.blob.size,
                )
            )

    def results(self, key: Key) -> list[AcceptedResult]:
        """The accepted results that count in a piece of work, or those under a message's key.

        In the order of hops and devices.
        """
        query = sa.select(_results).where(_has_key(key) if isinstance(key, MessageKey) else _counts_in(key))
        with self._reading() as connection:
            rows = connection.execute(query.order_by(_results.c.hop, _results.c.device, _results.c.round))
            return [AcceptedResult(r.device, r.hash, r.examples, r.size, r.hop, r.round) for r in rows]

    def delivered(self, run: str, *, since: int) -> set[tuple[str, int]]:
        """Who has delivered an update that began in round ``since`` or later: devices and rounds."""
        query = sa.select(_results.c.device, _results.c.round).where(
            _results.c.run == run, _results.c.kind == "train", _results.c.round >= since
        )
        with self._reading() as connection:
            return {(row.device, row.round) for row in connection.execute(query)}

    def set_multiples(self, run: str, multiples: dict[int, float]) -> None:
        """Record the plan of augmentation, which holds for the whole run."""
        with self._transaction() as connection:
            connection.execute(
                sa.update(_runs).where(_runs.c.id == run).values(multiples=msgspec.json.encode(multiples))
            )

    def aggregate(self, row: RoundRow, *, model: bytes, state: bytes, old_state: str, keep: bool) -> None:
        """Record a round's model and state, all in one transaction; forget what is no longer needed."""
        with self._transaction() as connection:
            for data in (model, state):
                _put(connection, data)
            connection.execute(
                sa.update(_rounds).where(_is_row(row)).values(status="aggregated", model_after=sha256(model))
            )
            connection.execute(
                sa.update(_runs)
                .where(_runs.c.id == row.run)
                .values(round=row.round, model=sha256(model), state=sha256(state))
            )
            # A model or a state may equal the one before it, byte for byte.
            forgotten = {old_state, row.model_before} - {sha256(model), sha256(state)}
            if not keep:
                forgotten |= self._result_hashes(connection, row)
            _forget(connection, forgotten, row)
            connection.execute(
                sa.delete(_declared).where(_declared.c.run == row.run, _declared.c.round < row.round)
            )

    def set_figures(self, row: RoundRow, figures: dict[str, Any]) -> None:
        """Record what a round came to."""
        with self._transaction() as connection:
            connection.execute(
                sa.update(_rounds).where(_is_row(row)).values(figures=msgspec.json.encode(figures))
            )

    def repeat(self, row: RoundRow) -> None:
        """Record that an attempt has failed; its updates are never aggregated."""
        with self._transaction() as connection:
            connection.execute(sa.update(_rounds).where(_is_row(row)).values(status="repeated"))
            hashes = self._result_hashes(connection, row)
            _forget(connection, hashes, row)

    def forget(self, run: str) -> None:
        """Remove a run that has opened no round."""
        with self._transaction() as connection:
            _unlearn(connection, run, ["describe"])
            connection.execute(sa.delete(_runs).where(_runs.c.id == run))

    def end(self, run: str) -> None:
        """Record that all rounds are done. What devices have said of their data is needed no longer.

        Statistics are kept where updates are, for replay.
        """
        kept = self.get(run).config.keep_updates
        with self._transaction() as connection:
            _unlearn(connection, run, ["describe"] if kept else ["describe", "statistics"])
            connection.execute(sa.update(_runs).where(_runs.c.id == run).values(ended=True))

    def rounds(self, run: str, *, number: int | None = None) -> list[RoundRow]:
        """All attempts at all rounds of a run, or at round ``number``, in order; a calibration is last."""
        query = sa.select(_rounds).where(_rounds.c.run == run)
        if number is not None:
            query = query.where(_rounds.c.round == number)
        with self._reading() as connection:
            ordered = query.order_by(_rounds.c.round, _rounds.c.kind.desc(), _rounds.c.attempt)
            rows = connection.execute(ordered)
            return [_round_row(row) for row in rows]

    def published(self, fleet: str) -> list[Ref]:
        """What a server has left on the broker, as far as it knows."""
        query = sa.select(_published.c.ref).where(_published.c.fleet == fleet)
        with self._reading() as connection:
            return [msgspec.json.decode(ref, type=Ref) for ref in connection.execute(query).scalars()]

    def set_published(self, fleet: str, refs: list[Ref]) -> None:
        """Record what is on the broker, before it is put there and after it is cleared."""
        with self._transaction() as connection:
            connection.execute(sa.delete(_published).where(_published.c.fleet == fleet))
            for ref in refs:
                connection.execute(
                    sa.insert(_published).values(fleet=fleet, hash=ref.hash, ref=msgspec.json.encode(ref))
                )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise RunError(
                f"the store cannot be read ({_first_line(error)}): mend the database, then give the same "
                "command again"
            ) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except sa.exc.SQLAlchemyError as error:
            raise RunError(
                f"the store cannot be written ({_first_line(error)}); nothing is lost: free the disk or mend "
                "the database, then give the same command again"
            ) from None

    def _check_schema(self, exclusive: bool) -> None:
        with self._engine.begin() as connection:
            found = connection.execute(sa.select(_meta.c.schema)).scalar()
            if found is None and exclusive:
                connection.execute(sa.insert(_meta).values(schema=SCHEMA))
            elif found != SCHEMA:
                raise RunError(
                    f"the store has schema {found}, this server reads {SCHEMA}: use a new --work-dir"
                )

    def _result_hashes(self, connection: sa.Connection, key: WorkKey | RoundRow) -> set[str]:
        query = sa.select(_results.c.hash).where(_counts_in(key))
        return set(connection.execute(query).scalars())


def _take(work_dir: Path) -> IO[str]:
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


def _put(connection: sa.Connection, data: bytes) -> None:
    digest = sha256(data)
    if connection.execute(sa.select(_blobs.c.hash).where(_blobs.c.hash == digest)).first() is None:
        connection.execute(sa.insert(_blobs).values(hash=digest, data=data))


def _forget(connection: sa.Connection, hashes: set[str], key: RoundRow | None) -> None:
    """Delete blobs of a piece of work, except those that anything else has with the same bytes."""
    needed = [sa.select(column) for column in (_runs.c.bundle, _runs.c.model, _runs.c.state)]
    others = sa.select(_results.c.hash)
    if key is not None:
        # Other attempts at the round have ended as this one has.
        same = (_results.c.run == key.run, _results.c.counted == key.round, _results.c.kind == key.kind)
        others = others.where(sa.not_(sa.and_(*same)))
    needed.append(others)
    unused = [_blobs.c.hash.not_in(query) for query in needed]
    connection.execute(sa.delete(_blobs).where(_blobs.c.hash.in_(hashes), *unused))


def _unlearn(connection: sa.Connection, run: str, kinds: list[str]) -> None:
    """Delete what devices have said of their data, rows and bytes."""
    told = sa.and_(_results.c.run == run, _results.c.kind.in_(kinds))
    hashes = set(connection.execute(sa.select(_results.c.hash).where(told)).scalars())
    connection.execute(sa.delete(_results).where(told))
    _forget(connection, hashes, None)


def _is_row(row: RoundRow) -> sa.ColumnElement[bool]:
    return sa.and_(
        _rounds.c.run == row.run,
        _rounds.c.round == row.round,
        _rounds.c.attempt == row.attempt,
        _rounds.c.kind == row.kind,
    )


def _counts_in(key: RoundRow | WorkKey) -> sa.ColumnElement[bool]:
    return sa.and_(
        _results.c.run == key.run,
        _results.c.counted == key.round,
        _results.c.attempt == key.attempt,
        _results.c.kind == key.kind,
    )


def _has_key(key: MessageKey) -> sa.ColumnElement[bool]:
    return sa.and_(
        _results.c.run == key.run,
        _results.c.round == key.round,
        _results.c.attempt == key.attempt,
        _results.c.kind == key.kind,
    )


def _run_row(row: sa.Row[Any]) -> RunRow:
    return RunRow(
        id=row.id,
        fleet=row.fleet,
        config=msgspec.json.decode(row.config, type=RunConfig),
        bundle=row.bundle,
        model=row.model,
        state=row.state,
        round=row.round,
        ended=row.ended,
        created=row.created,
        multiples=msgspec.json.decode(row.multiples, type=dict[int, float]) if row.multiples else None,
    )


def _round_row(row: sa.Row[Any]) -> RoundRow:
    return RoundRow(
        run=row.run,
        round=row.round,
        attempt=row.attempt,
        kind=row.kind,
        status=row.status,
        wanted=row.wanted,
        selected=msgspec.json.decode(row.selected, type=list[str]),
        chains=msgspec.json.decode(row.chains, type=list[list[str]]),
        exponents=msgspec.json.decode(row.exponents, type=dict[str, int]),
        model_before=row.model_before,
        model_after=row.model_after,
        figures=msgspec.json.decode(row.figures) if row.figures else None,
        noise_seed=bytes(row.noise_seed) if row.noise_seed else None,
    )


def _make_durable(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
