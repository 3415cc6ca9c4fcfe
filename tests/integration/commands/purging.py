"""Records to purge, the purge, and a transaction beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg2

import servers
from flask_idempotency.cli import cli
from flask_idempotency.stores.postgres import statements

EXPIRE = "update idempotency_record set expires_at = clock_timestamp()"

FILL = """insert into idempotency_record
       (key, name, state, fingerprint_version, fingerprint, attempt, owner, created_at, expires_at)
select sha256(n::text::bytea), 'filled', 'in_progress', 1, sha256(''), 1, 'somebody',
       now() - interval '2 h', now() - interval '1 h' + n * interval '1 ms'
  from generate_series(1, {}) as n"""


def purge(world: Any, *options: str) -> str:
    result = world.app.test_cli_runner().invoke(cli, ["purge", *options])
    assert result.exit_code == 0, result.output
    return result.output


def purged(world: Any, batch: int = 1000) -> list[int]:
    """Purge without the command's output, which threads would share."""
    with world.app.app_context():
        return list(world.app.extensions["idempotency"].records.admin().purge(batch))


def send_purge(cursor: Any, batch: int = 1000) -> int:
    """What the purge sends for one batch, in the cursor's own transaction; how many it deleted."""
    message = statements.PURGE.format(table="idempotency_record", role="'none'")
    message = message.replace("50ms", "20s")  # a test that holds it up may be slow
    values = {"batch": batch, "since": "-infinity"}
    cursor.execute(message, values)
    return int(cursor.fetchone()[0])


@contextmanager
def outside(world: Any) -> Iterator[Any]:
    """A cursor in a transaction of its own, rolled back unless it commits."""
    connection = psycopg2.connect(servers.plain_dsn(world.app.config["SQLALCHEMY_DATABASE_URI"]))
    try:
        yield connection.cursor()
    finally:
        connection.rollback()  # the server has let go of its locks when this returns, unlike a close
        connection.close()
