"""Programs of :mod:`tests.differential.documented` that found something once, by what they showed."""

from __future__ import annotations

import tests.differential.documented  # noqa: F401 -- its steps
from tests.differential.programs import Program
from tests.differential.steps import do

COMMIT, ROLLBACK = do("commit"), do("rollback")
OTHER = do("in a session of its own", do("read"))


def _read_that_writes(name: str) -> Program:
    return Program(view=(do("text", name),), after=(COMMIT,))


KEPT: dict[str, Program] = {
    "an empty tuple where there was one value, behind a commit": Program(
        view=(
            *(do("bind", "in", "one tuple"), do("text", "trigger that writes"), COMMIT),
            *(do("bind", "in", "empty tuple"), ROLLBACK, do("write an author", "Late"), COMMIT),
        )
    ),
    "an infinite value where a finite one cannot be parsed": Program(
        view=(
            *(
                do("bind", "date", "infinity"),
                do("rollback"),
                do("text", "trigger that writes"),
                COMMIT,
            ),
            *(do("bind", "date", "float"), ROLLBACK, do("write an author", "Late"), COMMIT),
        )
    ),
    "a savepoint that was rolled back to, and is released inside another": Program(
        view=(
            *(do("text", "savepoint in capitals"), do("driver SQL", "to savepoint")),
            do("in a savepoint of the connection", do("text", "release")),
        )
    ),
    "a value inside quotes, behind a commit": Program(
        view=(
            *(do("bind", "interval", "float"), do("text", "trigger that writes"), COMMIT),
            *(do("bind", "interval", "infinity"), ROLLBACK, do("write an author", "Late"), COMMIT),
        )
    ),
    "an empty text inside quotes, behind a commit": Program(
        view=(
            *(do("bind", "interval", "empty"), ROLLBACK, do("text", "trigger that writes"), COMMIT),
            *(do("bind", "interval", "text"), ROLLBACK, do("write an author", "Late"), COMMIT),
        )
    ),
    "an aggregate that writes": _read_that_writes("aggregate"),
    "a quoted function": _read_that_writes("quoted function"),
    "a function in a schema": _read_that_writes("function in a schema"),
    "a quoted function, and another session": Program(
        view=(do("text", "quoted function"), OTHER, COMMIT)
    ),
    "a rejection leaves an author with her books": Program(
        view=(do("write an author", "Woolf"),), answer="conflict"
    ),
    "an error leaves an author with her books": Program(
        view=(do("write an author", "Woolf"),), answer="raise", handler="plain"
    ),
    "an empty statement, behind what waits": Program(
        view=(
            *(do("driver SQL", "empty"), ROLLBACK, do("text", "function"), COMMIT),
            *(do("driver SQL", "empty"), ROLLBACK),
        )
    ),
    "a savepoint in capitals": Program(
        view=(
            do("driver SQL", "savepoint in capitals"),
            do("nested, kept", do("cursor", "to savepoint")),
        )
    ),
    "a value that cannot be parsed in an aborted transaction": Program(
        view=(do("text", "division"), do("bind", "function", "empty tuple"))
    ),
    "a closed cursor": Program(view=(do("driver", "psycopg2", "closed cursor"),), catches="nothing"),
}

HIDDEN: dict[str, Program] = {
    "an operator that writes": _read_that_writes("operator"),
    "an attribute that writes": _read_that_writes("attribute"),
    "a domain that writes": _read_that_writes("domain"),
    "a cast that writes": _read_that_writes("cast"),
    "a view that writes": _read_that_writes("view"),
    "a namesake that writes": _read_that_writes("an overloaded name"),
    "a policy that writes": Program(view=(do("text", "clerk"), do("text", "policy")), after=(COMMIT,)),
    "an operator, and another session": Program(view=(do("text", "operator"), OTHER, COMMIT)),
}
"""The same where reads may write."""

PSYCOPG: dict[str, Program] = {
    "a stream of psycopg's own": Program(
        view=(do("driver", "psycopg", "stream"), do("text", "function"), COMMIT)
    ),
    "a stream of psycopg's own that is left early": Program(
        view=(do("driver", "psycopg", "stream left early"), do("text", "function"), COMMIT)
    ),
    "a statement prepared as text": Program(
        view=(
            do("for good", "prepare a function"),
            do("nested, first error ends it", do("text", "function that fails")),
            do("fail", "no table"),
        )
    ),
    "a statement prepared as text, and a rollback": Program(
        view=(*[do("read")] * 6, do("for good", "prepare a function"), ROLLBACK)
    ),
}
"""The same with psycopg's own methods, or what it prepares by itself."""
