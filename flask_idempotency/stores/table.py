"""The table ``idempotency_record``.

Part of the application's own metadata, so that ``db.create_all()`` and Flask-Migrate see it.
"""

from __future__ import annotations

import sqlalchemy as sa

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.core.keys import KEY_BYTES

FILLFACTOR = 92
"""Percent of a page that inserts may fill.

The completing UPDATE writes a second version of each row. With a twelfth of the page left free it finds
room on the same page and stays a HOT update (Postgres manual, "Heap-Only Tuples"): no index is touched.
That holds for responses of up to 600 bytes; of those of 1,000 it holds for five in six, and the sixth
costs 100 bytes in the indexes and the WAL. Higher breaks HOT for smaller ones. Lower wastes disk twice:
PostgreSQL prunes a page on which less than a tenth is free, and with 90 or less an insert may leave it
for the next one before that, with the first versions of its rows.
"""

_OURS = "flask_idempotency"
"""Marks, in ``Table.info``, a table that was defined here."""


def define_table(metadata: sa.MetaData, name: str) -> sa.Table:
    """The table of the records in ``metadata``, defined at the first call and found at later ones.

    Only ``expires_at`` is indexed beside the key, and completing does not change it (see ``finish`` in
    :mod:`.sql`): that, with the fill factor, is what keeps the completing UPDATE a HOT one. The partial
    index saves operators' commands from reading the whole table; an atomic operation is not in it. None
    may name ``state``, ``status`` or ``completed_at``.

    Raises ``ConfigurationError`` for any other table of that name.
    """
    there = metadata.tables.get(f"{metadata.schema}.{name}" if metadata.schema else name)
    if there is not None and not there.info.get(_OURS):
        raise ConfigurationError(
            f"{there.fullname} is in the application's metadata already. If db.reflect() has found it,"
            " call that after idempotency.init_app(); if it is a table of the application's own, choose"
            " another IDEMPOTENCY_TABLE"
        )
    if there is not None:
        return there
    table = sa.Table(
        name,
        metadata,
        # In bytea it compares by bytes, so no collation can ever let two rows in.
        sa.Column("key", sa.LargeBinary(KEY_BYTES), primary_key=True, comment="hash of scope and key"),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False, index=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("completed_at", sa.DateTime(timezone=True)),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), comment="null: none, or released"),
        sa.Column("attempt", sa.Integer, nullable=False, comment="fencing token: 1, 2, ..."),
        sa.Column("fingerprint_version", sa.SmallInteger, nullable=False),
        sa.Column("status", sa.SmallInteger),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("owner", sa.String(22), nullable=False, comment="random, of the present attempt"),
        sa.Column("name", sa.String(255), nullable=False, comment="the operation's, e.g. the endpoint"),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False),
        sa.Column(
            "headers", sa.JSON, comment="list of pairs, or a word for usual ones; null when sealed"
        ),
        sa.Column("body", sa.LargeBinary, comment="null when it was too large to store"),
        sa.Column("released_attempt", sa.Integer, comment="after which an operator released it"),
        sa.Column(
            "steps",
            sa.JSON,
            comment="finished ones by name: result (sealed like responses), attempt, time",
        ),
        sa.Column(
            "audit", sa.JSON, comment="what operators did to it, when and why; no request reads this"
        ),
        comment="Idempotency keys and their responses (Flask-Idempotency)",
        info={_OURS: True},
        # SQLAlchemy 2.0 knows no storage parameters of tables. What it does know, and Alembic renders,
        # stands right before them.
        postgresql_using=f"heap WITH (fillfactor = {FILLFACTOR})",
    )
    # Not partial on SQLite: to name that here would import its dialect, 40 ms, everywhere.
    leased = table.c.lease_expires_at
    sa.Index(f"ix_{name}_leased", leased, postgresql_where=leased.is_not(None))
    return table
