"""The tables ``idempotency_record`` and ``idempotency_record_step``.

Part of the application's own metadata, so that ``db.create_all()`` and Flask-Migrate see them.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import (
    JSON,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
)

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.keys import KEY_BYTES
from flask_idempotency.core.records import OBSERVED

FILLFACTOR = 92
"""Percent of a page that inserts may fill.

The completing UPDATE writes a second version of each row. With a twelfth of the page left free it finds
room on the same page and stays a HOT update (Postgres manual, "Heap-Only Tuples"): no index is touched.
That holds for responses of up to 600 bytes; of those of 1,000 it holds for five in six, and the sixth
costs 100 bytes in the indexes and the WAL. Higher breaks HOT for smaller ones. Lower wastes disk twice:
PostgreSQL prunes a page on which less than a tenth is free, and with 90 or less an insert may leave it
for the next one before that, with the first versions of its rows.
"""

VERSION = "owner || ' ' || state || ' ' || coalesce(CAST(lease_expires_at AS text), '')"
"""What an operator has seen, in SQL: any attempt, lease, end or decision makes another one."""

IS_OBSERVED = f"substr(owner, 1, {len(OBSERVED)}) = '{OBSERVED}'"
"""Whether an operation was only observed, in SQL."""

NO_LEASE = f"(lease_expires_at IS NULL OR {IS_OBSERVED})"
"""Whether a record may be deleted as far as its lease goes, in SQL. What was only observed may be even
if it was interrupted: it needs nobody's decision."""

HAS_STEPS = "EXISTS (SELECT 1 FROM {steps} AS s WHERE s.key = {table}.key)"
"""Whether a step of the operation has finished, in SQL."""

RELEASED_KEEPS = f"(released_attempt IS NOT NULL OR {HAS_STEPS})"
"""Whether an operation that its view gives back has done something, in SQL: then it does not expire."""

_OURS = "flask_idempotency"
"""Marks, in ``Table.info``, the tables that were defined here."""


def define_table(metadata: MetaData, name: str) -> Table:
    """The table of the records in ``metadata``, defined at the first call and found at later ones.

    Only ``expires_at`` is indexed beside the key, and completing does not change it (see
    ``FINISH`` of PostgreSQL): that, with the fill factor, is what keeps the completing UPDATE a HOT
    one. The partial index saves operators' commands from reading the whole table; an atomic operation
    is not in it. None may name ``state``, ``status`` or ``completed_at``.
    """
    return _defined(_records, metadata, name)


def define_steps(records: Table) -> Table:
    """The table of the finished steps of operations that are not atomic, beside that of the records.

    No foreign key: its check would lock the record's row. Whoever deletes a record deletes its steps
    in the same statement.
    """
    return _defined(_steps, records.metadata, f"{records.name}_step")


def _qualified(metadata: MetaData, name: str) -> str:
    return f"{metadata.schema}.{name}" if metadata.schema else name


def _defined(build: Callable[[MetaData, str], Table], metadata: MetaData, name: str) -> Table:
    """Define what ``build`` makes, once in ``metadata``. Raises ``ConfigurationError`` for another.

    A table with our columns was reflected from the database. It is ours, perhaps without an index.
    """
    there = metadata.tables.get(_qualified(metadata, name))
    if there is None:
        return build(metadata, name)
    if there.info.get(_OURS):
        return there
    convention = metadata.naming_convention
    ours = build(MetaData(metadata.schema, naming_convention=convention, info=metadata.info), name)
    if not set(ours.columns.keys()) <= set(there.columns.keys()):
        raise ConfigurationError(
            f"IDEMPOTENCY_TABLE makes {there.fullname} a table of the extension, but that is a table of"
            " the application's own: choose another name for one of the two"
        )
    return ours


def _records(metadata: MetaData, name: str) -> Table:
    table = Table(
        name,
        metadata,
        # In bytea it compares by bytes, so no collation can ever let two rows in.
        Column("key", LargeBinary(KEY_BYTES), primary_key=True, comment="hash of scope and key"),
        Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
        Column("created_at", DateTime(timezone=True), nullable=False),
        Column("completed_at", DateTime(timezone=True)),
        Column("lease_expires_at", DateTime(timezone=True), comment="null: none, or released"),
        Column("attempt", Integer, nullable=False, comment="fencing token: 1, 2, ..."),
        Column("fingerprint_version", SmallInteger, nullable=False),
        Column("status", SmallInteger),
        Column("state", String(16), nullable=False),
        Column("owner", String(22), nullable=False, comment="random, of the present attempt"),
        Column("name", String(255), nullable=False, comment="the operation's, e.g. the endpoint"),
        Column("fingerprint", LargeBinary, nullable=False),
        Column("headers", JSON, comment="list of pairs, or a word for usual ones; null when sealed"),
        Column("body", LargeBinary, comment="null when it was too large to store"),
        Column("released_attempt", Integer, comment="after which an operator released it"),
        Column("audit", JSON, comment="what operators did to it, when and why; no request reads this"),
        comment="Idempotency keys and their responses (Flask-Idempotency)",
        info={_OURS: True},
        # SQLAlchemy 2.0 knows no storage parameters of tables. What it does know, and Alembic renders,
        # stands right before them.
        postgresql_using=f"heap WITH (fillfactor = {FILLFACTOR})",
    )
    # Not partial on SQLite: to name that here would import its dialect, 40 ms, everywhere.
    leased = table.c.lease_expires_at
    Index(f"ix_{name}_leased", leased, postgresql_where=leased.is_not(None))
    return table


def _steps(metadata: MetaData, name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("key", LargeBinary(KEY_BYTES), primary_key=True, comment="the record's"),
        Column("name", String(255), primary_key=True),
        Column("attempt", Integer, nullable=False, comment="that finished it"),
        Column("created_at", DateTime(timezone=True), nullable=False),
        Column("result", LargeBinary, nullable=False, comment="JSON; sealed like responses"),
        comment="Finished steps of idempotent operations (Flask-Idempotency)",
        info={_OURS: True},
    )
