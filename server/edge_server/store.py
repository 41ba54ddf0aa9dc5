"""What a run must not forget, in one database: every transition is durable before it is acknowledged.

SQLite by default, PostgreSQL by URL. Models, states and updates are rows of the same database, so that
a transition and its bytes are there together or not at all, and another machine can go on.
"""

from __future__ import annotations

import math
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from edge_sdk.errors import RunError
from edge_sdk.protocol.messages import Key as MessageKey
from edge_sdk.protocol.messages import Offer, Ref, Taken, key_of
from edge_sdk.tensors import sha256
from edge_server import blobs
from edge_server.config import RunConfig
from edge_server.database import Database
from edge_server.rows import AcceptedResult, Key, RoundRow, RunRow, WorkKey
from edge_server.tables import declared as _declared
from edge_server.tables import published as _published
from edge_server.tables import results as _results
from edge_server.tables import rounds as _rounds
from edge_server.tables import runs as _runs


class Store:
    """The durable state of all runs in one database.

    Args:
        work_dir: made where it is missing.
        url: an SQLAlchemy URL; None for SQLite in ``work_dir``.
        exclusive: take the folder for one server; RunError if another has it. Others only read.

    Raises:
        RunError: the database cannot be opened, or is of another schema version; later, from every method,
            that it cannot be read or written, is lost, or has been taken over by another server.
    """

    def __init__(self, work_dir: Path, url: str | None = None, *, exclusive: bool = True) -> None:
        self.work_dir = work_dir
        self._database = Database(work_dir, url, exclusive=exclusive)

    def close(self) -> None:
        """Close the database and give the folder and the fleet back."""
        self._database.close()

    def take(self, fleet: str) -> None:
        """Hold ``fleet`` for this server, which may write from now on; RunError if another one has it."""
        self._database.take(fleet)

    def runs(self, fleet: str | None = None) -> list[RunRow]:
        """All runs, or a fleet's, the oldest first."""
        query = sa.select(_runs).order_by(_runs.c.created)
        if fleet is not None:
            query = query.where(_runs.c.fleet == fleet)
        with self._database.reading() as connection:
            return [_run_row(row) for row in connection.execute(query)]

    def get(self, run: str) -> RunRow:
        """One run; RunError if there is none."""
        with self._database.reading() as connection:
            row = connection.execute(sa.select(_runs).where(_runs.c.id == run)).first()
        if row is None:
            raise RunError(f"the store has no run {run}")
        return _run_row(row)

    def begin(self, config: RunConfig, bundle: bytes, model: bytes, state: bytes) -> RunRow:
        """Record a new run with its first model and state."""
        # They are told apart by their order, whatever a clock does.
        with self._database.reading() as connection:
            newest = connection.execute(sa.select(sa.func.max(_runs.c.created))).scalar() or 0.0
        row = RunRow(
            id=secrets.token_hex(16),
            fleet=config.fleet,
            config=config,
            bundle=sha256(bundle),
            model=sha256(model),
            state=sha256(state),
            round=0,
            ended=False,
            created=max(time.time(), math.nextafter(newest, math.inf)),
        )
        with self._database.transaction() as connection:
            for data in (bundle, model, state):
                blobs.put(connection, data)
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
        with self._database.reading() as connection:
            data = blobs.read(connection, digest)
        if data is None:
            raise RunError(f"the store has lost blob {digest[:12]}: restore it from a backup")
        return data

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
        with self._database.transaction() as connection:
            connection.execute(sa.insert(_rounds).values(values))

    def set_selected(self, row: RoundRow, selected: list[str]) -> None:
        """Record replacements."""
        with self._database.transaction() as connection:
            connection.execute(
                sa.update(_rounds).where(_is_row(row)).values(selected=msgspec.json.encode(selected))
            )

    def declare(self, device: str, taken: Taken) -> None:
        """Record how many examples a device said that it would use for a task; what it said first counts."""
        key = key_of(taken)
        with self._database.transaction() as connection:
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
        with self._database.reading() as connection:
            found = connection.execute(query).scalar()
            return None if found is None else int(found)

    def begun(self, run: str, *, since: int) -> dict[str, int]:
        """By device, the round of the last training that it took, of those from round ``since`` on."""
        query = sa.select(_declared.c.device, sa.func.max(_declared.c.round)).where(
            _declared.c.run == run, _declared.c.kind == "train", _declared.c.round >= since
        )
        with self._database.reading() as connection:
            found = connection.execute(query.group_by(_declared.c.device))
            return {device: int(number) for device, number in found}

    def accept(self, device: str, offer: Offer, data: bytes, *, counted: int) -> None:
        """Record an accepted result with its bytes; the receipt may be sent after this.

        Args:
            counted: the round that it counts in.
        """
        with self._database.transaction() as connection:
            blobs.put(connection, data)
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
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(_results.c.hop, _results.c.device, _results.c.round))
            return [
                AcceptedResult(r.device, r.hash, r.examples, r.size, r.hop, r.round, r.held) for r in rows
            ]

    def delivered(self, run: str, *, since: int) -> set[tuple[str, int]]:
        """Who has delivered an update that began in round ``since`` or later: devices and rounds."""
        query = sa.select(_results.c.device, _results.c.round).where(
            _results.c.run == run, _results.c.kind == "train", _results.c.round >= since
        )
        with self._database.reading() as connection:
            return {(row.device, row.round) for row in connection.execute(query)}

    def set_multiples(self, run: str, multiples: dict[int, float]) -> None:
        """Record the plan of augmentation, which holds for the whole run."""
        with self._database.transaction() as connection:
            connection.execute(
                sa.update(_runs).where(_runs.c.id == run).values(multiples=msgspec.json.encode(multiples))
            )

    def aggregate(
        self, row: RoundRow, config: RunConfig, *, model: bytes, state: bytes, old_state: str
    ) -> None:
        """Record a round's model and state, all in one transaction; forget what is no longer needed.

        Where updates are kept but not all, the model and the state before each of those rounds are too: from
        them replay begins.
        """
        keep = config.keep_updates
        bounded = keep and config.forgets and row.kind == "train"
        done = {"status": "aggregated", "model_after": sha256(model)}
        with self._database.transaction() as connection:
            for data in (model, state):
                blobs.put(connection, data)
            kept = {"state_before": old_state} if bounded else {}
            # Without the updates nobody needs the noise but who would take it away.
            bare = {} if keep else {"noise_seed": None}
            connection.execute(sa.update(_rounds).where(_is_row(row)).values(**done, **kept, **bare))
            connection.execute(
                sa.update(_runs)
                .where(_runs.c.id == row.run)
                .values(round=row.round, model=sha256(model), state=sha256(state))
            )
            unneeded = {old_state, row.model_before}
            if not keep:
                unneeded |= _let_go(connection, _counts_in(row))
            if bounded:
                unneeded |= _expire(connection, row.run, _forgotten(connection, row, config))
            blobs.discard(connection, unneeded)
            # What is late still counts in the buffered mode.
            oldest = row.round - (config.max_staleness if config.mode == "buffered" else 0)
            connection.execute(
                sa.delete(_declared).where(_declared.c.run == row.run, _declared.c.round < oldest)
            )

    def set_figures(self, row: RoundRow, figures: dict[str, Any]) -> None:
        """Record what a round came to."""
        with self._database.transaction() as connection:
            connection.execute(
                sa.update(_rounds).where(_is_row(row)).values(figures=msgspec.json.encode(figures))
            )

    def repeat(self, row: RoundRow) -> None:
        """Record that an attempt has failed; its updates are never aggregated."""
        with self._database.transaction() as connection:
            connection.execute(
                sa.update(_rounds).where(_is_row(row)).values(status="repeated", noise_seed=None)
            )
            blobs.discard(connection, _let_go(connection, _counts_in(row)))

    def forget(self, run: str) -> None:
        """Remove a run that has opened no round."""
        row = self.get(run)
        with self._database.transaction() as connection:
            _unlearn(connection, run, ["describe"])
            connection.execute(sa.delete(_runs).where(_runs.c.id == run))
            blobs.discard(connection, {row.bundle, row.model, row.state})

    def end(self, run: str) -> None:
        """Record that all rounds are done. What devices have said of their data is needed no longer.

        Statistics are kept where updates are, for replay.
        """
        kept = self.get(run).config.keep_updates
        with self._database.transaction() as connection:
            _unlearn(connection, run, ["describe"] if kept else ["describe", "statistics"])
            connection.execute(sa.update(_runs).where(_runs.c.id == run).values(ended=True))

    def rounds(self, run: str, *, number: int | None = None) -> list[RoundRow]:
        """All attempts at all rounds of a run, or at round ``number``, in order; a calibration is last."""
        query = sa.select(_rounds).where(_rounds.c.run == run)
        if number is not None:
            query = query.where(_rounds.c.round == number)
        with self._database.reading() as connection:
            ordered = query.order_by(_rounds.c.round, _rounds.c.kind.desc(), _rounds.c.attempt)
            rows = connection.execute(ordered)
            return [_round_row(row) for row in rows]

    def published(self, fleet: str) -> list[Ref]:
        """What a server has left on the broker, as far as it knows."""
        query = sa.select(_published.c.ref).where(_published.c.fleet == fleet)
        with self._database.reading() as connection:
            return [msgspec.json.decode(ref, type=Ref) for ref in connection.execute(query).scalars()]

    def set_published(self, fleet: str, refs: list[Ref]) -> None:
        """Record what is on the broker, before it is put there and after it is cleared."""
        with self._database.transaction() as connection:
            connection.execute(sa.delete(_published).where(_published.c.fleet == fleet))
            for ref in refs:
                connection.execute(
                    sa.insert(_published).values(fleet=fleet, hash=ref.hash, ref=msgspec.json.encode(ref))
                )


def _let_go(connection: sa.Connection, which: sa.ColumnElement[bool]) -> set[str]:
    """Note that results' bytes are no longer kept; returns their hashes."""
    held = sa.and_(which, _results.c.held)
    hashes = set(connection.execute(sa.select(_results.c.hash).where(held)).scalars())
    connection.execute(sa.update(_results).where(held).values(held=False))
    return hashes


def _forgotten(connection: sa.Connection, row: RoundRow, config: RunConfig) -> int:
    """The last round whose updates are no longer kept once ``row`` is done."""
    last = row.round - config.keep_rounds if config.keep_rounds else 0
    if not config.keep_bytes:
        return last
    counted = _results.c.counted
    sizes = (
        sa.select(counted, sa.func.sum(_results.c.size))
        .where(_results.c.run == row.run, _results.c.kind == row.kind, _results.c.held, counted > last)
        .group_by(counted)
        .order_by(counted.desc())
    )
    total = 0
    for number, size in connection.execute(sizes).all():
        total += int(size)
        if total > config.keep_bytes and number < row.round:
            return int(number)
    return last


def _expire(connection: sa.Connection, run: str, last: int) -> set[str]:
    """Let the updates of all rounds to ``last`` go, and what replay would have begun them with."""
    old = sa.and_(_rounds.c.run == run, _rounds.c.round <= last, _rounds.c.state_before.is_not(None))
    befores = connection.execute(sa.select(_rounds.c.model_before, _rounds.c.state_before).where(old)).all()
    connection.execute(sa.update(_rounds).where(old).values(state_before=None, noise_seed=None))
    trained = sa.and_(_results.c.run == run, _results.c.kind == "train", _results.c.counted <= last)
    return _let_go(connection, trained) | {digest for before in befores for digest in before}


def _unlearn(connection: sa.Connection, run: str, kinds: list[str]) -> None:
    """Delete what devices have said of their data, rows and bytes."""
    told = sa.and_(_results.c.run == run, _results.c.kind.in_(kinds))
    hashes = set(connection.execute(sa.select(_results.c.hash).where(told)).scalars())
    connection.execute(sa.delete(_results).where(told))
    blobs.discard(connection, hashes)


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
        state_before=row.state_before,
        figures=msgspec.json.decode(row.figures) if row.figures else None,
        noise_seed=bytes(row.noise_seed) if row.noise_seed else None,
    )
