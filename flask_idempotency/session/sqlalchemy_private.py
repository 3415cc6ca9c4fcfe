"""What is private in SQLAlchemy: one name. No other file uses any.

``_connections`` of a session's transaction has, for each engine or connection that it was asked for
with, the connection, the transaction on it, whether to commit that, and whether to close the
connection. Seen in SQLAlchemy 2.0.26, 2.0.58 and 2.1.9; ``tests/unit/test_private_sqlalchemy.py`` fails
when a release changes it.
"""

# ruff: noqa: SLF001 -- this is what the file is for

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.orm import Session, SessionTransaction


def connections(session: Session) -> set[Connection]:
    """The connections of the session's present transaction."""
    transaction = session.get_transaction()
    return set() if transaction is None else {found[0] for found in transaction._connections.values()}


def begun_by(session: Session) -> list[SessionTransaction]:
    """The transactions that the session has open, each inside the next one.

    A listener that calls ``begin_nested()`` when one ends may leave one behind whose root is gone.
    """
    found, transaction = [], session.get_nested_transaction()
    while transaction is not None:
        found.append(transaction)
        transaction = transaction.parent
    root = session.get_transaction()
    if found and found[-1] is root:
        return found
    return [] if root is None else [root]


def continue_nested(session: Session, connection: Connection) -> None:
    """Let the session's transactions go on in savepoints of ``connection``, which they are in.

    When one ends, its savepoint ends, and neither the connection's transaction nor its time with us.
    """
    for each in reversed(begun_by(session)):
        if connection in each._connections:
            nested: Any = (connection, connection.begin_nested(), True, False)
            for bind, found in list(each._connections.items()):
                if found[0] is connection:
                    each._connections[bind] = nested
