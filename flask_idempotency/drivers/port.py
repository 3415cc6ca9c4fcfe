"""What we need of a driver for PostgreSQL, and no more. A driver is a module here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Values = Mapping[str, Any]


def innermost(connection: Any) -> Any:
    """The driver's own connection, without what an agent for tracing has put around it.

    Agents follow wrapt: what a proxy is around is its ``__wrapped__``.
    """
    while (inner := getattr(connection, "__wrapped__", None)) is not None:
        connection = inner
    return connection


class Answer(Protocol):
    """What a message answered, with DB-API's names."""

    @property
    def rowcount(self) -> int:
        """How many rows its last statement changed or returned."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        """All rows of the last statement that returned some; an empty list if none did."""


class Driver(Protocol):
    """One driver. ``connection`` is its own, see :func:`innermost`."""

    LEVELS: Mapping[Any, str]
    """What a connection's ``isolation_level`` stands for, as after BEGIN; empty for none."""

    SEES_TEXTS: bool
    """Whether it notices that a text has ended a transaction that it began itself."""

    def is_idle(self, connection: Any) -> bool:
        """Return True if no transaction is open on the server, as far as the driver knows."""

    def has_ended(self, connection: Any) -> bool:
        """Return True if the server has no transaction open, whatever the driver believes."""

    def is_failed(self, connection: Any) -> bool:
        """Return True if a statement has failed and nobody has rolled back, as far as it knows."""

    def take(self, connection: Any) -> Any:
        """Let us send BEGIN and COMMIT ourselves, on a connection without a transaction."""

    def give_back(self, connection: Any, found: Any) -> None:
        """Undo :meth:`take`, which has returned what it ``found``, and :meth:`show`."""

    def show(self, connection: Any) -> Callable[[bool], object] | None:
        """Let the driver see that a transaction is open which is not its own to end.

        Returns what must be called before a savepoint is ended that is around this, if anything: with
        True if a statement has failed.
        """

    def send(
        self,
        connection: Any,
        text: str,
        values: Values | None = None,
        first: Sequence[str] = (),
        *,
        inside: bool = False,
        prepared: bool = False,
    ) -> Answer:
        """Send statements of our own, in one message if the driver can: ``first``, then a text of some.

        In the text, ``%(name)s`` stands for a value, and ``%%`` for a per cent sign if there are
        values. ``inside`` says that a transaction is open: otherwise the message is one. ``prepared``
        says that nothing of the application's can have ended what was prepared.
        """
