"""What a view commits beside a response that is not stored: the operation undoes it.

Without the extension it would stay, so whoever protects a view is told, once: a counter of wrong
passwords that is committed before a 403 would never count.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.orm import Session

from flask_idempotency.core.logs import log

from .sources import Sessions

_warned: set[tuple[bool, str]] = set()


def warn_undone(name: str, status: int, *, observed: bool = False) -> None:
    """Say once for each name that a response is not stored, and undoes what was committed."""
    if (observed, name) in _warned:
        return
    _warned.add((observed, name))
    log.warning(
        "the view of %s committed changes and responded with %d, which is not stored: %s. If they"
        " are to stay, store such responses with store=lambda response: response.status_code < 500, or"
        " write them on a connection of their own: with db.engine.begin()",
        name,
        status,
        "enforced, the changes are undone" if observed else "the changes are undone",
    )


@dataclass(eq=False)
class Commits:
    """What ``db.session`` commits during a request that is only observed."""

    has_written = has_committed = False

    def note_commit(self, session: Session) -> None:
        """A transaction of the session's has committed."""
        if session.get_nested_transaction() is None:
            self.has_committed = self.has_committed or self.has_written


watched: ContextVar[Commits | None] = ContextVar("flask_idempotency.commits", default=None)
"""Those of the request that is observed here."""

_heard: WeakSet[type] = WeakSet()
"""The classes of sessions whose commits are heard: from the first observed request on."""


def watch_commits(sessions: Sessions) -> Commits:
    """From now on, until ``watched`` is None again, keep account of what is committed here."""
    kind = sessions.factory.class_
    if kind not in _heard:
        _heard.add(kind)
        event.listen(kind, "after_commit", _note_commit)
        event.listen(kind, "after_soft_rollback", _note_rollback)
    found = Commits()
    watched.set(found)
    return found


def _note_commit(session: Session) -> None:
    if (commits := watched.get()) is not None:
        commits.note_commit(session)


def _note_rollback(_session: Session, _undone: object) -> None:
    if (commits := watched.get()) is not None:
        commits.has_written = False
