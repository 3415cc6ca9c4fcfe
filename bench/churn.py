"""How large the table stays: days in which as many records come as expire, each in seconds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import repeat
from typing import Any

import psycopg2

import servers
from flask_idempotency.core.keys import KEY_BYTES

from .paths import new_keys, sending
from .records import COLUMNS, NAME, Database, columns

HOURS = 24
"""The retention: after it, all records have been replaced. A purge follows each hour."""

WRITERS = 2
"""Their records lie on the same pages."""

# What stands first in the search path hides pg_catalog's own.
_CLOCK = """CREATE SEQUENCE hours;
CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
'SELECT pg_catalog.clock_timestamp()
        + coalesce(pg_sequence_last_value(''public.hours''::regclass), 0) * interval ''1 h'''"""
_SEARCH_PATH = "options=-csearch_path%3Dpublic,pg_catalog"

# Both versions of a row, each in a transaction of its own, and the read after them: as by a request.
_COME = f"""CREATE PROCEDURE come(records int) LANGUAGE plpgsql AS $$
DECLARE
  mine bytea;
BEGIN
  FOR n IN 1 .. records LOOP
    mine := substring(sha256(gen_random_uuid()::text::bytea) for {KEY_BYTES});
    INSERT INTO {NAME} ({", ".join(COLUMNS)}) SELECT {{claimed}} FROM claimed, completed, LATERAL (
      SELECT clock_timestamp() + interval '{HOURS} h' - completed.expires_at AS later) AS _;
    COMMIT;
    UPDATE {NAME} SET {{completing}} FROM completed WHERE {NAME}.key = mine;
    PERFORM FROM {NAME} WHERE key = mine;
    COMMIT;
  END LOOP;
END $$"""

_CHANGED = "SELECT claimed.{0}::text IS DISTINCT FROM ended.{0}::text FROM claimed, ended"

_SIZES = f"""SELECT json_object_agg(relname, pg_relation_size(oid)) FROM pg_class
 WHERE oid = '{NAME}'::regclass
    OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = '{NAME}'::regclass)"""
_UPDATES = f"""SELECT n_tup_hot_upd::float / n_tup_upd FROM pg_stat_user_tables
 WHERE relname = '{NAME}'"""


class Churn(Database):
    """A table whose clock is ours. Records come as by requests with responses of 200 bytes."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url}?{_SEARCH_PATH}", during=self._note_claimed)
        for path, name in (("/held", "ended"), ("/text", "completed")):
            sending(self.client, path, new_keys())()
            self.ask(f"CREATE TABLE {name} AS TABLE {NAME}; TRUNCATE {NAME}")
        claimed = columns("completed.{0} + later") | {"key": "mine"}
        changed = [name for name in COLUMNS if self.ask(_CHANGED.format(name))]
        completing = ", ".join(f"{name} = completed.{name}" for name in changed)
        claimed |= {name: f"claimed.{name}" for name in changed}
        self.ask(_COME.format(claimed=", ".join(claimed.values()), completing=completing))
        self.ask(_CLOCK)

    def come(self, records: int) -> None:
        """Let records come, on a connection of its own."""
        connection = psycopg2.connect(servers.plain_dsn(self.url))
        with closing(connection), connection.cursor() as cursor:
            connection.autocommit = True
            cursor.execute("SET synchronous_commit = off")
            cursor.execute("CALL come(%s)", (records,))

    def pass_an_hour(self) -> None:
        """Move the clock on, and purge what has expired."""
        self.ask("SELECT nextval('hours')")
        self.purge()

    def _note_claimed(self) -> None:
        self.ask(f"CREATE TABLE claimed AS TABLE {NAME}")


def measure(postgres: servers.Postgres, records: int, turnovers: int) -> dict[str, Any]:
    """The bytes of the table and of its indexes after each time that all records were replaced."""
    with closing(Churn(postgres.database("churn"))) as table, ThreadPoolExecutor(WRITERS) as writers:
        each = records // HOURS // WRITERS
        sizes = []
        for _ in range(turnovers):
            for _ in range(HOURS):
                list(writers.map(table.come, repeat(each, WRITERS)))
                table.pass_an_hour()
            sizes.append(table.ask(_SIZES))
        return {
            "records": table.ask(f"SELECT count(*) FROM {NAME}"),
            "hot": table.ask(_UPDATES),
            "sizes": sizes,
        }
