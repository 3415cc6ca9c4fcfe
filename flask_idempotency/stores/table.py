"""The table ``idempotency_record``.

Part of the application's own metadata, so that ``db.create_all()`` and Flask-Migrate see it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    DDL,
    JSON,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    event,
)

FILLFACTOR = 80
"""Percent of a page that inserts may fill.

The completing UPDATE writes a second version of each row. With a fifth of the page left free it
finds room on the same page and stays a HOT update (Postgres manual, "Heap-Only Tuples"): no index
is touched, and the first version's room is used again. Lower wastes disk, higher breaks HOT.
"""

KEY_BYTES = 32
"""SHA-256. A digest in ``bytea`` compares by bytes, so no collation can ever let two rows in."""


def define_table(metadata: MetaData, name: str) -> Table:
    """The table of the records in ``metadata``, defined at the first call and found at later ones.

    Only ``expires_at`` is indexed beside the key, and completing does not change it (see
    ``FINISH``): that, with the fill factor, is what keeps the completing UPDATE a HOT one.
    """
    full_name = f"{metadata.schema}.{name}" if metadata.schema else name
    if full_name in metadata.tables:
        return metadata.tables[full_name]
    table = Table(
        name,
        metadata,
        Column("key", LargeBinary(KEY_BYTES), primary_key=True, comment="hash of scope and key"),
        Column("expires_at", DateTime(timezone=True), nullable=False, index=True),
        Column("created_at", DateTime(timezone=True), nullable=False),
        Column("completed_at", DateTime(timezone=True)),
        Column("lease_expires_at", DateTime(timezone=True), comment="of operations not atomic"),
        Column("attempt", Integer, nullable=False, comment="fencing token: 1, 2, ..."),
        Column("fingerprint_version", SmallInteger, nullable=False),
        Column("status", SmallInteger),
        Column("state", String(16), nullable=False),
        Column("owner", String(22), nullable=False, comment="random, of the present attempt"),
        Column("name", String(255), nullable=False, comment="the operation's, e.g. the endpoint"),
        Column("fingerprint", LargeBinary(32), nullable=False),
        Column("headers", JSON, comment="list of pairs; null when the answer is sealed"),
        Column("body", LargeBinary, comment="null when it was too large to keep"),
        comment="Idempotency keys and their answers (Flask-Idempotency)",
    )
    fill: Any = DDL(  # type: ignore[no-untyped-call]
        f"ALTER TABLE %(fullname)s SET (fillfactor = {FILLFACTOR})"
    )
    event.listen(table, "after_create", fill.execute_if(dialect="postgresql"))
    return table
