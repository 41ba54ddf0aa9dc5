"""Bytes by their SHA-256 in the store's database, in pieces that any database takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from edge_sdk.tensors import sha256
from edge_server.tables import blobs, results, rounds, runs

PIECE = 8 << 20
"""Bytes of a blob in one row."""
AT_ONCE = 500
"""Hashes named in one statement: databases bound their number."""


def put(connection: sa.Connection, data: bytes) -> None:
    """Record ``data``, once."""
    digest = sha256(data)
    if connection.execute(sa.select(blobs.c.piece).where(blobs.c.hash == digest).limit(1)).first() is None:
        for piece, start in enumerate(range(0, max(len(data), 1), PIECE)):
            row = {"hash": digest, "piece": piece, "data": data[start : start + PIECE]}
            connection.execute(sa.insert(blobs).values(row))


def read(connection: sa.Connection, digest: str) -> bytes | None:
    """The bytes with this hash; None if they are missing or damaged."""
    found: list[bytes] = []
    # One at a time: a driver holds a statement's whole answer in memory.
    while (piece := connection.execute(_piece(digest, len(found))).scalar()) is not None:
        found.append(piece)
    data = b"".join(found)
    return data if found and sha256(data) == digest else None


def discard(connection: sa.Connection, hashes: Iterable[str]) -> None:
    """Delete blobs, except those that a run, a result or a kept round has with the same bytes."""
    used = [
        sa.exists().where(column == blobs.c.hash, *conditions)
        for column, *conditions in (
            (runs.c.bundle,),
            (runs.c.model,),
            (runs.c.state,),
            (results.c.hash, results.c.held),
            (rounds.c.state_before,),
            (rounds.c.model_before, rounds.c.state_before.is_not(None)),
        )
    ]
    unused = [sa.not_(exists.correlate(blobs)) for exists in used]
    named = sorted(hashes)
    for start in range(0, len(named), AT_ONCE):
        some = blobs.c.hash.in_(named[start : start + AT_ONCE])
        connection.execute(sa.delete(blobs).where(some, *unused))


def _piece(digest: str, number: int) -> sa.Select[Any]:
    return sa.select(blobs.c.data).where(blobs.c.hash == digest, blobs.c.piece == number)
