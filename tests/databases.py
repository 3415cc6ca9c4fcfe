"""Databases that are used again: to make one takes twenty times as long as to delete its rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import psycopg2

from servers import plain_dsn

EMPTY = """
    do $$ declare found_schema text; begin
        for found_schema in select quote_ident(nspname) from pg_namespace
            where nspname !~ '^(pg_|information_schema)'
        loop
            execute 'drop schema ' || found_schema || ' cascade';
        end loop;
        create schema public;
        grant usage on schema public to public;
        execute format('alter database %I reset all', current_database());
    end $$;
"""
"""What makes any database as good as new."""

DELETE = """
    do $$ declare found regclass; begin
        for found in select oid from pg_class where relkind = 'r' and oid >= 16384 loop
            execute 'delete from ' || found;
        end loop;
        perform setval(oid::regclass, 1, false) from pg_class where relkind = 'S' and oid >= 16384;
    end $$;
"""
"""The same, where only rows have come and gone."""

ALONE = """
    select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()
"""

TABLES = {"idempotency_record", "payment"}
CATALOGS = {
    "pg_attrdef": "oid",
    "pg_attribute": "attrelid",
    "pg_class": "oid",
    "pg_constraint": "oid",
    "pg_default_acl": "oid",
    "pg_event_trigger": "oid",
    "pg_extension": "oid",
    "pg_index": "indexrelid",
    "pg_namespace": "oid",
    "pg_policy": "oid",
    "pg_proc": "oid",
    "pg_trigger": "oid",
    "pg_type": "oid",
}
SHAPE = " union all ".join(
    f"select count(*), coalesce(sum(xmin::text::bigint), 0) from {catalog} where {key} >= 16384"
    for catalog, key in CATALOGS.items()
) + (
    " union all select count(*), coalesce(sum(setdatabase::bigint), 0) from pg_db_role_setting"
    " where setdatabase = (select oid from pg_database where datname = current_database())"
)
"""Differs after a change to a table, function, right or setting: rows of catalogs know their writer."""


class Databases:
    """The databases of one server, by their URLs for SQLAlchemy."""

    def __init__(self, postgres: Any) -> None:
        self._postgres = postgres
        self._numbers = itertools.count(1)
        self._free: list[str] = []
        self._cursors: dict[str, Any] = {}
        self._shapes: dict[str, Any] = {}

    def take(self, *, tables: bool = False) -> str:
        """An empty database. It may have the usual ``tables``, without rows."""
        if not self._free:
            return self._postgres.database(f"reused_{next(self._numbers)}")
        url = max(self._free, key=lambda each: (each in self._shapes) is tables)
        self._free.remove(url)
        try:
            self._clean(url, self._shapes.pop(url, None) if tables else None)
        except psycopg2.OperationalError:  # the test has cut off everybody
            del self._cursors[url]
            self._clean(url)
        return url

    def _clean(self, url: str, shape: Any = None) -> None:
        cursor = self._cursor(url)
        cursor.execute(ALONE)
        if shape and shape == _shape(cursor):
            cursor.execute(DELETE)
            self._shapes[url] = shape
        else:
            cursor.execute(EMPTY)

    def _cursor(self, url: str) -> Any:
        """On a connection that stays: a new one would read all catalogs anew."""
        if url not in self._cursors:
            connection = psycopg2.connect(plain_dsn(url))
            connection.autocommit = True
            self._cursors[url] = connection.cursor()
        return self._cursors[url]

    def has(self, tables: Iterable[str], *, at: str) -> bool:
        """Whether no table has to be made there."""
        return at in self._shapes and set(tables) <= TABLES

    def note(self, url: str) -> None:
        """Note that the usual tables were made there, if it is they."""
        if url not in self._shapes:
            cursor = self._cursor(url)
            cursor.execute("select relname from pg_class where relkind = 'r' and oid >= 16384")
            if {name for (name,) in cursor.fetchall()} == TABLES:
                self._shapes[url] = _shape(cursor)

    def give_back(self, url: str) -> None:
        """Nobody uses it any more."""
        self._free.append(url)

    def close(self) -> None:
        """Let go of the connections."""
        for cursor in self._cursors.values():
            cursor.connection.close()


def _shape(cursor: Any) -> list[tuple[int, int]]:
    cursor.execute(SHAPE)
    return cursor.fetchall()
