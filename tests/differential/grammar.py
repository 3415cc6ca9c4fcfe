"""Programs: random sequences of what views do with their session, and how one is made smaller.

A program is short: some steps before the view, in it, above it and after the request, the answer, and
what the application is like. What steps there are: the tables of ``steps`` and ``manuals``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from random import Random

from tests.differential import manuals, steps
from tests.differential.steps import FAILURES, OTHER_CONNECTIONS, Step, do

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


# Steps that often come together, beside each of its own

COMMIT, ROLLBACK, FLUSH, READ = do("commit"), do("rollback"), do("flush"), do("read")
SHOW, BACK = do("read settings"), do("undo the savepoint")


def texts(*names: str) -> Steps:
    return tuple(do("text", name) for name in names)


def ends_of(failure: Step) -> list[Steps]:
    """An error, and what a view does next."""
    return [
        (failure, ROLLBACK),
        (failure, COMMIT),
        (do("nested, first error ends it", do("add", "c"), failure),),
        (do("savepoint"), failure, BACK),
        (COMMIT, failure, ROLLBACK, do("add", "b"), COMMIT),
    ]


def failures() -> Iterator[Step]:
    """All steps that are there to fail."""
    yield from (do("fail", how) for how in FAILURES)
    names = ("function that fails", "trigger that refuses", "call that commits", "write, then fail")
    for name in (*names, "concurrently", "vacuum", "a seat taken", *manuals.TEXTS["failing"]):
        yield from (do("text", name), do("cursor", name))


TOGETHER: dict[str, list[Steps]] = {
    "always": [
        *[(COMMIT,)] * 2,
        *((do("add", label),) for label in "abc"),
        (do("insert", "a"),),
        (do("text", "function"), COMMIT),
    ],
    "orm": [(do("add", "a"), COMMIT), (do("modify", "old"), FLUSH)],
    "core": [(do("insert", "b"), COMMIT)],
    "savepoints": [
        (do("savepoint"), do("add", "c"), BACK),
        (do("savepoint"), do("insert", "c"), do("release the savepoint")),
        (do("savepoint"), do("fail", "unique"), BACK, do("add", "b")),
        (do("savepoint"), do("text", "function"), BACK),
        texts("savepoint", "duplicate", "to savepoint"),
        (do("text", "savepoint quoted"), FLUSH, do("text", "to savepoint quoted")),
    ],
    "settings": [
        (do("set", "local tenant"), do("add", "a"), COMMIT),
        (do("set", "local path"), do("insert", "a")),
        (COMMIT, SHOW),
        (ROLLBACK, SHOW),
    ],
    "locks": [
        (do("lock", "row"), ROLLBACK, do("count up by engine")),
        (do("lock", "advisory"), ROLLBACK, do("read locks")),
    ],
    "connection": [
        (do("make a temporary table", "for a transaction"), do("fill the temporary table")),
        (do("open a stream"), do("read the stream")),
    ],
    "engine": [(do("count up"), ROLLBACK, do("count up by engine"))],
    "constraints": [
        (*texts("one seat deferred", "a seat taken"), COMMIT),
        (*texts("a parent missing", "the parent"), COMMIT),
        (do("text", "a parent missing"), COMMIT),
    ],
    "states": [
        (do("change the kept book", "price"), COMMIT, do("read the kept book")),
        (do("change the kept book", "expression"), ROLLBACK, do("read the kept book")),
    ],
    "effects": [  # whoever takes the effect for a read loses it here
        (do("text", name), other)
        for name in manuals.TEXTS["effects"]
        for other in (
            do("in a session of its own", READ),
            do("in a helper's context", READ),
            do("by a second session", do("add", "b"), COMMIT),
            COMMIT,
        )
    ],
}

HELPERS_STEPS: list[Steps] = [
    *((step,) for step in (READ, COMMIT, ROLLBACK, SHOW, do("keep a book"))),
    *((do("add", label),) for label in "bc"),
    (do("insert", "b"),),
    (do("add", "b"), COMMIT),
    *((do("lock", what),) for what in ("advisory at once", "row at once")),
    (do("set", "local tenant"),),
    *((step,) for step in texts("authors", "quoted function", "view")),
]

# By design a LOCAL setting from before the view outlives its first commit, and all sessions of the view
# have the advisory locks that were taken before it.
BEFORE: list[Steps] = [
    (READ,),
    (do("keep a book"),),
    (do("add", "b"),),
    (do("add", "b"), COMMIT),
    *((do("set", what),) for what in ("tenant", "mode", "read only")),
    (do("set", "mode"), COMMIT),
    (do("insert", "b"),),
    (do("lock", "row"),),
    (READ, do("close")),
    (do("fail", "division"),),
    (do("choose", "schema"),),
    *((step,) for step in texts("quoted function", "function in a schema")),
    (do("read the kept book"), do("change the kept book", "price")),
    (do("iterate", "left early"),),
]
ABOVE: list[Steps] = [
    *[(COMMIT,)] * 3,
    *((step,) for step in (ROLLBACK, READ, SHOW, do("raise"), do("text", "journal"))),
    (do("add", "z"), COMMIT),
    (do("insert", "z0"), COMMIT),
    (do("fail", "division"), ROLLBACK),
    (do("ask", "select note_it('above')"), COMMIT),
    (do("read the kept book"),),
]


class Grammar:
    """What programs for a driver are made of: fragments of one step or a few, by family."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        self.table = [*steps.TABLE, *manuals.table_of(driver)]
        self.fragments: dict[str, list[Steps]] = {}
        for row in self.table:
            words = [(word,) for word in row.words] or [()]
            self.fragments.setdefault(row.family, []).extend((do(row.kind, *word),) for word in words)
        self.blocks, self.helpers = (
            [step.kind for (step,) in self.fragments.pop(family)] for family in ("blocks", "helpers")
        )
        del self.fragments[""]
        self.fragments["driver"] += [
            (*each, end) for each in self.fragments["driver"] for end in (COMMIT, ROLLBACK)
        ]
        self.fragments["failures"] += [each for failure in failures() for each in ends_of(failure)]
        for family, together in TOGETHER.items():
            self.fragments[family] += together
        self.always = self.fragments.pop("always")

    @property
    def kinds(self) -> set[str]:
        """All kinds of steps that it can make."""
        return {row.kind for row in self.table if row.family}

    def program(self, chance: Random) -> Program:
        """Any program. It draws on a few families only, so that some are all of one kind."""
        choice = chance.choice
        chosen = chance.sample(sorted(self.fragments), choice((0, 1, 1, 2, 2, 3, 4)))
        pools = [self.always, self.always, *(self.fragments[family] for family in chosen)]
        around = choice([[], [], self.blocks, self.blocks, self.blocks + self.helpers, self.helpers])

        def some(fragments: list[Steps], least: int, most: int) -> Steps:
            found = (choice(fragments) for _ in range(chance.randint(least, most)))
            return tuple(step for each in found for step in each)

        def many(least: int, most: int, depth: int = 0) -> Steps:
            found: Steps = ()
            for _ in range(chance.randint(least, most)):
                if around and depth < 2 and chance.random() < 0.2:
                    kind = choice(around)
                    inner = some(HELPERS_STEPS, 1, 4) if kind in self.helpers else many(0, 4, depth + 1)
                    found += (do(kind, *inner),)
                else:
                    found += choice(choice(pools))
            return found

        where = choice(["", "", "", "", "above", "after"])
        above = some(ABOVE, 1, 2)
        program = Program(
            many(2, 9) + choice([(COMMIT,), (COMMIT,), ()]),
            before=some(BEFORE, 1, 2) if chance.random() < 0.2 else (),
            above=above if where == "above" else (),
            after=above if where == "after" else (),
            answer=choice(["created"] * 8 + ["conflict", "forbidden", "error", "raise"]),
            catches=choice(["database errors"] * 8 + ["nothing", "everything"]),
            handler=choice(["", "", "plain", "rolls back"]),
            isolation=choice([""] * 8 + ["REPEATABLE READ", "SERIALIZABLE"]),
            begins_above=chance.random() < 0.05,
        )
        # By design all sessions of a view have one snapshot.
        return replace(program, isolation="") if program.kinds & {*self.helpers} else program


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The smallest program found that still fails: nothing can be taken away from it."""
    for smaller in _smaller(program):
        if fails(smaller):
            return shrunk(smaller, fails)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for each in fields(Program):
        value = getattr(program, each.name)
        if value != each.default:
            yield replace(program, **{each.name: each.default})
        if each.name in PARTS:
            yield from (replace(program, **{each.name: fewer}) for fewer in _fewer(value))


def _fewer(steps: Steps) -> Iterator[Steps]:
    """Without one of them, or with one that is smaller."""
    for at, step in enumerate(steps):
        yield steps[:at] + steps[at + 1 :]
        if step.inner:
            yield steps[:at] + step.inner + steps[at + 1 :]
            for inner in _fewer(step.inner):
                yield (*steps[:at], replace(step, arguments=inner), *steps[at + 1 :])
