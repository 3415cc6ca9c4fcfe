"""Programs: sequences of what views do with their session. Random ones: ``chance``.

A program is short: some steps before the view, in it, above it and after the request, the answer, and
what the application is like. What steps there are: the tables of ``steps`` and ``manuals``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tests.differential.steps import OTHER_CONNECTIONS, Step, do

Steps = tuple[Step, ...]

PARTS = ("before", "view", "above", "after")


@dataclass(frozen=True)
class Program:
    """What an application does in one request.

    ``above`` runs in a decorator above the protection, after the view; ``after`` in an
    ``after_request`` function; ``begins_above`` puts ``with db.session.begin():`` around the view.
    ``handler`` stands for an error handler that answers 409: it is "plain" or "rolls back".
    ``each`` is SQL that a listener sends when a transaction begins, and ``vetoes`` the event in which
    a listener raises.
    """

    view: Steps = ()
    before: Steps = ()
    above: Steps = ()
    after: Steps = ()
    answer: str = "created"
    catches: str = "database errors"
    handler: str = ""
    isolation: str = ""
    begins_above: bool = False
    each: str = ""
    vetoes: str = ""

    def __repr__(self) -> str:
        named = [
            f"    {each.name}={getattr(self, each.name)!r},"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]
        return "\n".join(["Program(", *named, ")"])

    @property
    def surroundings(self) -> bool:
        """Whether it does something outside of the view."""
        return bool(self.before or self.above or self.after or self.begins_above)

    @property
    def kinds(self) -> set[str]:
        """The kinds of all its steps."""
        return {each.kind for part in PARTS for step in getattr(self, part) for each in walk(step)}

    @property
    def uses_other_connections(self) -> bool:
        return bool(self.kinds & OTHER_CONNECTIONS)


def walk(step: Step) -> Iterator[Step]:
    """A step and all steps inside it."""
    yield step
    for each in step.inner:
        yield from walk(each)


COMMIT, ROLLBACK, FLUSH, READ = do("commit"), do("rollback"), do("flush"), do("read")
SHOW = do("read settings")


def texts(*names: str) -> Steps:
    return tuple(do("text", name) for name in names)
