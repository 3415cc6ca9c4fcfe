"""What we need of a driver for PostgreSQL, and no more. A driver is a module here.

What all drivers have under the same name is not in it: ``commit()``, ``closed`` and ``info`` of a
connection. For the SQLSTATE of an error see :func:`~flask_idempotency.core.errors.sqlstate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, Protocol

IDLE, FAILED = 0, 3
"""States of a transaction, as libpq numbers them: none is open, and one in which a statement failed."""


def innermost(connection: Any) -> Any:
    """The driver's own connection, without what an agent for tracing has put around it.

    Agents follow wrapt: what a proxy is around is its ``__wrapped__``.
    """
    while (inner := getattr(connection, "__wrapped__", None)) is not None:
        connection = inner
    return connection


def methods_of(kind: type) -> set[str]:
    """All that a class has by name, but for DB-API's classes of errors."""
    return {name for name in dir(kind) if not isinstance(getattr(kind, name), type)}


KINDS = 32
"""How many of an application's classes are remembered, of cursors for example, for which one of ours
was made. Few have more than three; one that makes its own in each request must not fill the memory."""

Hear = Callable[[Any, Any, Any], None]
"""Is given a cursor, a statement and its parameters, as the driver is."""


class Driver(Protocol):
    """One driver. ``connection`` is its own, see :func:`innermost`."""

    Error: type[Exception]
    """The class of all its errors."""

    ANSWERS_EACH: bool
    """Whether the rows of a statement can be had if another one follows it in the same message."""

    REFUSED: Set[str]
    """What an operation does not let a view use of its connection: all but what asks for its state.

    An application's own class of connections may have more.
    """

    LEVELS: Mapping[Any, str]
    """What a connection's ``isolation_level`` stands for, as after BEGIN; empty for none."""

    FACTORIES: Set[str]
    """Its connection's attributes that make cursors. :meth:`cursors` has the application's own."""

    DOORS: Set[str]
    """Its connection's methods that :meth:`cursors` has, for an owner of units."""

    def send(
        self,
        connection: Any,
        text: str,
        values: dict[str, Any] | None = None,
        first: Sequence[str] = (),
    ) -> Answer:
        """Send statements of our own in one message, past the units: ``first``, then a text of some.

        In the text, ``%(name)s`` stands for a value. Begins no transaction. Raises the driver's errors.
        """
        ...

    def take(self, connection: Any) -> tuple[Callable[[], int], bool]:
        """Let us begin and end transactions ourselves, on a connection fresh from the pool.

        Returns a function that says in which state its transaction is, and whether a listener of the
        pool had begun one: it is committed.
        """
        ...

    def give_back(self, connection: Any, autocommit: bool) -> None:
        """Undo :meth:`take`, for a connection that was in ``autocommit`` mode or not.

        Undo also what the driver was shown of our transaction, which is over.
        """
        ...

    def question(self, pooled: Any) -> Any:
        """A cursor for a question of ours on a pooled connection; nobody hears it. Rows are tuples."""
        ...

    def bound(self, cursor: Any, statement: Any, parameters: Any) -> str:
        """The statement with its values, as ``cursor`` would send it."""
        ...

    def hear(self, pool: Any, connection: Any, hear: Hear) -> None:
        """Tell ``hear`` of all that a connection's cursors are about to send, until it is returned."""
        ...

    def cursors(self, units: Any) -> Cursors:
        """Let the statements of the connection's cursors pass through an operation's units."""
        ...


class Answer(Protocol):
    """What the last statement of a message answered, with DB-API's names."""

    @property
    def description(self) -> Any:
        """None if it returned no rows."""
        ...

    @property
    def rowcount(self) -> int:
        """How many rows it changed or returned."""
        ...

    @property
    def statusmessage(self) -> str | None:
        """Its command tag."""
        ...

    def fetchone(self) -> tuple[Any, ...] | None:
        """The first row."""
        ...

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows."""
        ...


class Cursors(Protocol):
    """The cursors of an operation's connection."""

    def new(self, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """A cursor of the application's class, for the units of ``owner``."""
        ...

    def close(self) -> None:
        """Give the connection its own cursors back."""
        ...
