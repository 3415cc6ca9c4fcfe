"""Bytes that a record takes in the database, with its part of the indexes."""

from __future__ import annotations

import psycopg2
from flask.testing import FlaskClient

import servers

from .paths import new_keys

RECORDS = 2000
"""Enough that a page more or less changes the figure by 4 bytes."""


def bytes_of_a_record(client: FlaskClient, database_url: str) -> float:
    """What first requests with responses of 200 bytes add to the table and its indexes, by record.

    Without a VACUUM meanwhile: the room that the first versions of rows leave is part of it.
    """
    keys = new_keys()
    before = _size(database_url)
    for _ in range(RECORDS):
        client.post("/text", headers={"Idempotency-Key": next(keys)})
    return (_size(database_url) - before) / RECORDS


def _size(database_url: str) -> int:
    connection = psycopg2.connect(servers.plain_dsn(database_url))
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_total_relation_size('idempotency_record')")
            (size,) = cursor.fetchone() or (0,)
            return int(size)
    finally:
        connection.close()
