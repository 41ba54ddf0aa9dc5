"""The tables of the store."""

from __future__ import annotations

import sqlalchemy as sa

SCHEMA = 3

HASH = sa.String(64)
ID = sa.String(32)
# In every database sorted by bytes, whatever its locale.
DEVICE = sa.String(64).with_variant(sa.String(64, collation="C"), "postgresql")

tables = sa.MetaData()
meta = sa.Table("meta", tables, sa.Column("schema", sa.Integer, primary_key=True))
# ``epoch`` counts the servers that a fleet has had: only the last one may write.
fleets = sa.Table(
    "fleets",
    tables,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("epoch", sa.Integer, nullable=False),
)
# A blob is cut, since no database likes values of a gigabyte.
blobs = sa.Table(
    "blobs",
    tables,
    sa.Column("hash", HASH, primary_key=True),
    sa.Column("piece", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)
runs = sa.Table(
    "runs",
    tables,
    sa.Column("id", ID, primary_key=True),
    sa.Column("fleet", sa.String(64), nullable=False, index=True),
    sa.Column("config", sa.LargeBinary, nullable=False),
    sa.Column("bundle", HASH, nullable=False),
    sa.Column("model", HASH, nullable=False),
    sa.Column("state", HASH, nullable=False),
    sa.Column("round", sa.Integer, nullable=False, default=0),
    sa.Column("ended", sa.Boolean, nullable=False, default=False),
    sa.Column("multiples", sa.LargeBinary),
    sa.Column("created", sa.Float, nullable=False),
)
rounds = sa.Table(
    "rounds",
    tables,
    sa.Column("run", ID, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("wanted", sa.Integer, nullable=False),
    sa.Column("selected", sa.LargeBinary, nullable=False),
    sa.Column("chains", sa.LargeBinary, nullable=False),
    sa.Column("exponents", sa.LargeBinary, nullable=False),
    sa.Column("model_before", HASH, nullable=False),
    sa.Column("model_after", HASH),
    # Where it is set, the state and the model before the round are kept.
    sa.Column("state_before", HASH),
    sa.Column("figures", sa.LargeBinary),
    sa.Column("noise_seed", sa.LargeBinary),
)
results = sa.Table(
    "results",
    tables,
    sa.Column("run", ID, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("hop", sa.Integer, primary_key=True),
    sa.Column("device", DEVICE, primary_key=True),
    sa.Column("counted", sa.Integer, nullable=False, index=True),
    sa.Column("hash", HASH, nullable=False, index=True),
    sa.Column("examples", sa.BigInteger, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    # Whether its bytes are kept.
    sa.Column("held", sa.Boolean, nullable=False, default=True),
)
declared = sa.Table(
    "declared",
    tables,
    sa.Column("run", ID, primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("hop", sa.Integer, primary_key=True),
    sa.Column("device", DEVICE, primary_key=True),
    sa.Column("examples", sa.BigInteger, nullable=False),
)
published = sa.Table(
    "published",
    tables,
    sa.Column("fleet", sa.String(64), primary_key=True),
    sa.Column("hash", HASH, primary_key=True),
    sa.Column("ref", sa.LargeBinary, nullable=False),
)
