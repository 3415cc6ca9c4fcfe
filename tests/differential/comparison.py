"""One program in both applications: equal, refused by name with nothing committed, or different."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tests.databases import Databases
from tests.differential.manuals import table_of
from tests.differential.steps import Program, Run
from tests.differential.twins import Request, Twin, savepoints_unchecked, settings_outlasting
from tests.differential.worlds import LEAKED, NOT_KEPT


@dataclass
class Observed:
    """What one application did with a program: the first request, its retry if there is a key."""

    first: Request
    state: frozenset[str]
    completed: bool = False
    retry: Any = None

    @property
    def is_broken(self) -> bool:
        """Whether the application broke by itself: SQLAlchemy cannot always close a session."""
        return self.first.status == 0 or LEAKED in self.state

    @property
    def comparable(self) -> set[str]:
        """The state, without what statements are prepared if psycopg decides that.

        It drops all of a connection, also the view's own, with a ROLLBACK once it has prepared one
        itself. In an operation they stay (``docs/session.md``).
        """
        is_psycopg = self.first.run.twin.engine.driver == "psycopg"
        return {line for line in self.state if not (is_psycopg and line.startswith("prepared "))}

    def leaves(self, plain: Observed) -> Iterator[str]:
        """What is left on a connection here, and not in the plain application."""
        return (f"state: {line}" for line in sorted(self.comparable - plain.comparable))


def observe(twin: Twin, program: Program, key: str, again: bool) -> Observed:
    """Run the program in one application, perhaps again with the same key; leave that as it was."""
    twin.clear()
    observed = Observed(twin.post(program, key), twin.state())
    if again:
        observed.completed = twin.is_completed()
        observed.retry = twin.post(program, key)
    if observed.state or not twin.is_fresh():
        twin.forget_connections()
    return observed


def nothing_done(run: Run) -> list[Any]:
    """The rows as they were when the protected part began, and what other connections committed."""
    rows = [row for row in run.baseline or () if row[0] != "tally"]
    rows += [("audit", label, "", "") for label in run.audits]
    rows += [
        ("tally", label, str(int(amount) + run.counted), owner)
        for table, label, amount, owner in run.baseline or ()
        if table == "tally"
    ]
    return sorted(rows)


def by_view(rows: list[Any]) -> list[Any]:
    """Without what programs write above the view, where nobody promises an answer that is not kept."""
    return [row for row in rows if not row[1].startswith("z")]


def differences(program: Program, plain: Observed, protected: Observed) -> list[str]:
    """Where the protected application was neither equal nor refused by name with nothing committed."""
    first = protected.first
    if plain.is_broken:
        return []
    if first.refusal:
        return list(_of_refused(plain, protected))
    found = list(_of_first_answers(plain.first, first))
    to_keep = _is_to_keep(first.status)
    # A success whose work was undone above its view is not stored.
    undone = bool(first.status < 400 and program.surroundings and not protected.completed)
    failed = first.run.failed_outside and protected.completed
    if protected.completed != to_keep and not (failed or undone):
        is_kept = "kept" if protected.completed else "not kept"
        found.append(f"record: a {first.status} is {is_kept}")
    return [*found, *(_of_kept if protected.completed else _of_not_kept)(program, plain, protected)]


def _is_to_keep(status: int) -> bool:
    return status < 500 and status not in NOT_KEPT


def _of_refused(plain: Observed, protected: Observed) -> Iterator[str]:
    first, retry = protected.first, protected.retry
    if protected.completed:
        yield "record: kept though refused"
    program = first.run.program  # what was done before the view may be committed after it
    if first.run.baseline is not None and not (program.before and (program.above or program.after)):
        yield from _unequal("rows of a refused request", nothing_done(first.run), by_view(first.rows))
    if not program.before:
        yield from protected.leaves(plain)
    # What stays on a connection, such as a prepared statement, may stop the retry earlier, and what is
    # done above the view a second time may fail.
    is_comparable = not (program.before or protected.state or retry.run.failed_outside)
    if retry.reply.replayed or (retry.status != first.status and is_comparable):
        yield f"retry: {retry.status} {retry.errors_by_name} after {first.status}"


def _of_first_answers(plain: Request, protected: Request) -> Iterator[str]:
    voided = protected.run.failed_outside and protected.status >= 500  # nobody is told of the view
    for part in () if voided else ("before", "view"):
        pairs = zip_longest(normal(plain.run.saw(part)), normal(protected.run.saw(part)))
        for mine, other in pairs:
            if mine != other:
                yield f"{part}: {mine} in plain, {other} in protected"
                break
    # What is not stored is rolled back before anything above the view could fail to commit it.
    never_tried = not _is_to_keep(protected.status) and plain.run.failed_outside
    if plain.status != protected.status and not never_tried:
        yield (
            f"status: {plain.status} {plain.errors_by_name} in plain,"
            f" {protected.status} {protected.errors_by_name} in protected"
        )
    elif not (never_tried or _is_alike(plain, protected)):
        yield "body"


def normal(seen: list[Any]) -> list[Any]:
    """What steps noted, without what differs by design after a failure (``BY_CLASS``).

    In a transaction that has failed no cursor is opened on the server, by whatever class; a block in a
    savepoint fails by an error in it or by that of undoing it; a stream after a rollback in the driver
    or in the server. A commit that fails because the one before it has is left out (``SECOND_COMMIT``).
    """
    found: list[Any] = []
    has_failed = False
    for kind, what in seen:
        is_second = (kind, what) == ("commit", "InvalidRequestError")
        if is_second and found and found[-1][0] == "commit":
            continue
        is_any = kind in ("in a savepoint of the connection", "read the stream")
        is_any |= has_failed and kind in ("open a stream", "driver")
        found.append([kind, "an error" if is_any and _is_error(what) else what])
        has_failed |= _is_error(what) and bool(what.partition(" ")[2])
        has_failed &= [kind, what] != ["rollback", "done"]
    return found


def _is_error(what: Any) -> bool:
    """Whether a step noted an error's class, and perhaps its SQLSTATE."""
    return bool(re.fullmatch(r"[A-Z]\w*(Error|(?= \w{5}$))( \w{5})?", str(what)))


def _is_alike(plain: Request, protected: Request) -> bool:
    """Whether the bodies are equal, where the view returned what it saw but for classes of errors."""
    if plain.text == protected.text:
        return True
    bodies = [each.text for each in (plain, protected)]
    if not all(each.startswith("[") for each in bodies):
        return False
    mine, other = (normal(json.loads(each)) for each in bodies)
    return mine == other


def _of_kept(program: Program, plain: Observed, protected: Observed) -> Iterator[str]:
    first, retry = protected.first, protected.retry
    for part in ("above", "after"):
        yield from _unequal(part, plain.first.run.saw(part), first.run.saw(part))
    yield from _unequal("rows", plain.first.rows, first.rows)
    yield from protected.leaves(plain)
    if not program.uses_other_connections:
        yield from (f"state: no {line}" for line in sorted(plain.comparable - protected.comparable))
    if retry.run.views:
        yield "retry: the view ran again"
    failed_outside = first.run.failed_outside or retry.run.failed_outside
    if not (failed_outside or (program.before and retry.refusal)):
        yield from _unequal(
            "retry", (first.status, first.text, True), (retry.status, retry.text, retry.reply.replayed)
        )
    if not program.surroundings:
        yield from _unequal("rows of the retry", first.rows, retry.rows)


def _of_not_kept(program: Program, plain: Observed, protected: Observed) -> Iterator[str]:
    first, retry = protected.first, protected.retry
    if first.run.baseline is not None and not _commits_what_was_before(program, plain, first):
        yield from _unequal("rows", by_view(nothing_done(first.run)), by_view(first.rows))
    yield from protected.leaves(plain)
    if retry.reply.replayed:
        yield "retry: replayed though not kept"
    if not (program.before or protected.state or retry.run.failed_outside):
        yield from _unequal("retry", (first.status, first.run.views), (retry.status, retry.run.views))
    if not (program.surroundings or protected.state or first.run.counted):
        yield from _unequal("what the retry saw", first.run.seen, retry.run.seen)


def _commits_what_was_before(program: Program, plain: Observed, first: Request) -> bool:
    """Whether a commit above the view has kept what the application had changed before it."""
    return bool(program.before and (program.above or program.after)) and first.rows == plain.first.rows


def _unequal(what: str, expected: Any, found: Any) -> list[str]:
    if expected == found:
        return []
    if isinstance(expected, list) and isinstance(found, list):
        missing = [each for each in expected if each not in found]
        extra = [each for each in found if each not in expected]
        return [f"{what}: {missing} missing, {extra} extra"]
    return [f"{what}: {expected} expected, {found} found"]


@dataclass
class Verdict:
    """What became of a program: equal, refused by a name, or different."""

    program: Program
    plain: Observed
    protected: Observed
    differences: list[str]

    @property
    def refusal(self) -> str:
        """By which name it was refused, if it was."""
        return self.protected.first.refusal

    def __str__(self) -> str:
        lines = [f"  {line}" for line in self.differences] or [f"  {self.refusal or 'equal'}"]
        return "\n".join([str(self.program), *lines])


class Twins:
    """Pairs of applications, one for each isolation level, on one server.

    ``options`` are those of a :class:`Twin`, as ``hidden``: reads may write in the database.
    """

    def __init__(self, databases: Databases, driver: str, **options: Any) -> None:
        self._databases, self.driver, self._options = databases, driver, options
        self.rows = table_of(driver)
        self._pairs: dict[str, tuple[Twin, ...]] = {}
        self._keys = itertools.count(1)

    def compare(self, program: Program) -> Verdict:
        """Run the program in a plain and a protected application."""
        plain, protected = self._pair(program.isolation)
        key = f"key-{next(self._keys)}"
        observed = observe(plain, program, key, False), observe(protected, program, key, True)
        run = observed[0].first.run
        assert not run.mistakes, f"{run.seen} in {program}"
        found = differences(program, *observed)
        if found and self._is_listed(program, plain, *observed):
            found = []
        return Verdict(program, *observed, found)

    def _is_listed(self, program: Program, plain: Twin, usual: Observed, protected: Observed) -> bool:
        """Whether it differs only by settings that outlast a commit, or by what follows a failed end.

        A plain application that does the same must be equal; above the view, where the operation may
        have ended, also the usual one.
        """
        above = [seen for seen in usual.first.run.seen if seen[0] in ("above", "after")]
        for parts in (("view", "above", "after"), ("view",)):
            with savepoints_unchecked(plain) as unchecked, settings_outlasting(plain, parts) as kept:
                again = observe(plain, program, "", False)
            if again.is_broken or not (unchecked or kept):
                return False
            if not differences(program, again, protected):
                return True
            inside = [seen for seen in again.first.run.seen if seen[0] in ("before", "view")]
            again.first.run.seen = inside + above
            if not differences(program, again, protected):
                return True
        return False

    def _pair(self, isolation: str) -> tuple[Twin, ...]:
        if isolation not in self._pairs:
            self._pairs[isolation] = tuple(
                Twin(
                    *(self._databases.take(), self.driver, self.rows, isolation),
                    **{"protected": protected, **self._options},
                )
                for protected in (False, True)
            )
        return self._pairs[isolation]

    @contextmanager
    def at_each_commit(self, sql: str) -> Iterator[None]:
        """In the protected application, a statement that spoils each commit that has added a row."""
        protected = self._pair("")[1]
        protected.admin_run(
            f"create function spoil() returns trigger language plpgsql as $$ begin {sql};"
            " return null; end $$; create constraint trigger spoil after insert on public.item"
            " deferrable initially deferred for each row when (new.label = 'c')"
            " execute function spoil()"
        )
        try:
            yield
        finally:
            protected.admin_run("drop function spoil cascade")

    def close(self) -> None:
        """Close every connection and give the databases back."""
        for twin in itertools.chain(*self._pairs.values()):
            twin.close()
            self._databases.give_back(twin.url)
