"""Programs: random sequences of what views do with their session.

A program is short: some steps before the view, in it, above it and after the request, the answer, and
what the application is like. :func:`programs` makes them, and :func:`shrunk` makes one smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.differential.steps import (
    FAILURES,
    LOCKS,
    OTHER_CONNECTIONS,
    SETTINGS,
    TEMPORARY,
    Step,
    do,
)

Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    """What an application does in one request.

    ``above`` runs in a decorator above the protection, after the view; ``after`` in an
    ``after_request`` function; ``begins_above`` puts ``with db.session.begin():`` around the view.
    ``handler`` stands for an error handler that answers 409: it is "plain" or "rolls back".
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

    def __repr__(self) -> str:
        named = [
            f"    {each.name}={_written(getattr(self, each.name))},"
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


PARTS = ("before", "view", "above", "after")


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(repr, value))},)"
    return repr(value)


def walk(step: Step) -> Iterator[Step]:
    """A step and all steps inside it."""
    yield step
    for each in step.inner:
        yield from walk(each)


# What programs are made of. A fragment is one step, or a few that often come together.


def each(kind: str, *words: object) -> list[Steps]:
    """One fragment for each word."""
    return [(do(kind, word),) for word in words]


NEW, OLD = ("a", "b", "c"), ("old", "older")
COMMIT, ROLLBACK, FLUSH, READ = (do("commit"),), (do("rollback"),), (do("flush"),), (do("read"),)

FAMILIES: dict[str, list[Steps]] = {
    "orm": [
        *each("add", *NEW),
        *each("add several", *NEW),
        *each("save in bulk", "a"),
        *each("modify", *OLD),
        *each("delete", *OLD),
        *each("update by ORM", *OLD),
        (do("add", "a"), do("commit")),
        (do("modify", "old"), do("flush")),
    ],
    "core": [
        *each("insert", *NEW),
        *each("insert many", "b"),
        *each("update", *OLD, "a"),
        *each("delete by core", *OLD, "a"),
        *each("insert as text", *NEW),
        *each("insert by connection", *NEW),
        (do("count up"),),
        (do("read tally"),),
        (do("insert", "b"), do("commit")),
    ],
    "loaded": [
        *each("load", *OLD),
        (do("load", "old"), do("change what is loaded")),
        (do("read what is loaded"),),
        (do("change what is loaded"),),
        (do("refresh what is loaded"),),
        (do("expunge what is loaded"),),
        (do("merge what is loaded"),),
        (do("expire all"),),
        (do("close"),),
        (do("remove"),),
    ],
    "savepoints": [
        (do("savepoint"),),
        (do("release the savepoint"),),
        (do("undo the savepoint"),),
        *each("send", "savepoint s1", "rollback to savepoint s1", "release savepoint s1"),
        *each("insert in a savepoint of the connection", *NEW, "old"),
        (do("savepoint"), do("add", "c"), do("undo the savepoint")),
        (do("savepoint"), do("insert", "c"), do("release the savepoint")),
        (do("savepoint"), do("fail", "unique"), do("undo the savepoint"), do("add", "b")),
    ],
    "failures": [
        *((do("fail", how), do("rollback")) for how in FAILURES),
        *((do("fail", how),) for how in FAILURES),
        *((do("nested, first error ends it", do("add", "c"), do("fail", how)),) for how in FAILURES),
    ],
    "settings": [
        *each("set", *SETTINGS),
        (do("read settings"),),
        (do("set", "local tenant"), do("add", "a"), do("commit")),
        (do("set", "local path"), do("insert", "a")),
        (do("commit"), do("read settings")),
        (do("rollback"), do("read settings")),
    ],
    "places": [
        *each("take a place", 1, 2),
        *each("take a place by ORM", 1, 2),
        (do("read places"),),
        (do("take a place", 1), do("commit")),
    ],
    "locks": [
        *each("lock", *LOCKS),
        (do("read locks"),),
        (do("lock", "row"), do("rollback"), do("count up by engine")),
        (do("lock", "advisory"), do("rollback"), do("read locks")),
    ],
    "connection": [
        *each("make a temporary table", *TEMPORARY),
        (do("fill the temporary table"),),
        (do("read the temporary table"),),
        (do("make a temporary table", "for a transaction"), do("fill the temporary table")),
        (do("prepare"),),
        (do("listen"),),
        (do("open a stream"),),
        (do("open a stream"), do("read the stream")),
        (do("read the stream"),),
        (do("translate the schema"),),
        (do("ask for serializable"),),
    ],
    "engine": [
        *each("write an audit by engine", "x"),
        (do("count up by engine"),),
        (do("count up"), do("rollback"), do("count up by engine")),
    ],
}
ALWAYS = [
    *FAMILIES["orm"][:3],
    COMMIT,
    COMMIT,
    COMMIT,
    ROLLBACK,
    FLUSH,
    READ,
    READ,
    *FAMILIES["core"][:1],
    (do("read the session"),),
]

BLOCKS = ("unit of work", "nested, kept", "nested, undone", "nested, first error ends it")
HELPERS = ("in a helper's context", "in a session of its own", "by a second session")
HELPERS_STEPS = [
    READ,
    COMMIT,
    ROLLBACK,
    *each("add", "b", "c"),
    *each("insert", "b"),
    *each("load", "old"),
]
HELPERS_STEPS += [(do("add", "b"), do("commit")), *each("lock", "advisory at once", "row at once")]
HELPERS_STEPS += [*each("set", "local tenant"), (do("read settings"),)]

# By design a LOCAL setting from before the view outlives its first commit, and all sessions of the view
# have the advisory locks that were taken before it.
BEFORE = [
    READ,
    *each("load", "old"),
    (do("add", "b"),),
    (do("load", "old"), do("change what is loaded")),
    (do("add", "b"), do("commit")),
    *each("set", "tenant", "mode"),
    (do("set", "mode"), do("commit")),
    *each("set", "read only"),
    (do("insert", "b"),),
    *each("lock", "row"),
    (do("read"), do("close")),
    *each("fail", "division"),
    (do("translate the schema"),),
]
ABOVE = [
    COMMIT,
    COMMIT,
    COMMIT,
    ROLLBACK,
    READ,
    (do("add", "z"), do("commit")),
    (do("insert", "z0"), do("commit")),
    (do("raise"),),
    (do("read settings"),),
    (do("fail", "division"), do("rollback")),
]


@dataclass(frozen=True)
class Grammar:
    """What programs are made of: fragments by family, those of every program, and of each place.

    ``families`` says how many of them a program draws on; ``blocks`` are steps around others, and
    ``helpers`` those that work with another session.
    """

    fragments: dict[str, list[Steps]]
    always: list[Steps]
    families: tuple[int, ...] = (0, 1, 1, 2, 2, 3)
    blocks: tuple[str, ...] = BLOCKS
    helpers: tuple[str, ...] = HELPERS
    helpers_steps: list[Steps] = field(default_factory=lambda: HELPERS_STEPS)
    before: list[Steps] = field(default_factory=lambda: BEFORE)
    above: list[Steps] = field(default_factory=lambda: ABOVE)

    @property
    def kinds(self) -> set[str]:
        """All kinds of steps that it can make."""
        parts = [self.always, self.helpers_steps, self.before, self.above, *self.fragments.values()]
        steps = (step for part in parts for steps in part for step in steps)
        return {each.kind for step in steps for each in walk(step)} | {*self.blocks, *self.helpers}


SESSIONS = Grammar(FAMILIES, ALWAYS)
"""What this module's families are about."""


class Maker:
    """Makes a program out of random numbers.

    It draws on a few families only: so some programs are all of one kind, and most are plain.
    """

    def __init__(self, chance: Random, grammar: Grammar = SESSIONS) -> None:
        self._chance, self._grammar = chance, grammar
        names = sorted(grammar.fragments)
        families = chance.sample(names, min(chance.choice(grammar.families), len(names)))
        always, blocks, helpers = grammar.always, grammar.blocks, grammar.helpers
        self._fragments = [always, always, *(grammar.fragments[name] for name in families)]
        self._blocks = chance.choice([(), (), blocks, blocks, (*blocks, *helpers), helpers])

    def program(self) -> Program:
        """Any program."""
        choice = self._chance.choice
        around = {"above": (), "after": (), "": ()}
        around[choice(["", "", "", "", "above", "after"])] = self._some(self._grammar.above, 1, 2)
        end = choice([COMMIT, COMMIT, ()])
        begins_above = choice("y------------------") == "y"
        handler = choice(["", "", "plain", "rolls back"])
        program = Program(
            self._steps(2, 9) + end,
            before=self._some(self._grammar.before, 1, 2) if choice("yyy------------") == "y" else (),
            above=around["above"],
            after=around["after"],
            answer=choice(["created"] * 8 + ["conflict", "forbidden", "error", "raise"]),
            catches=choice(["database errors"] * 8 + ["nothing", "everything"]),
            handler=handler,
            isolation=choice([""] * 8 + ["REPEATABLE READ", "SERIALIZABLE"]),
            begins_above=begins_above,
        )
        # By design all sessions of a view have one snapshot.
        return replace(program, isolation="") if program.kinds & {*HELPERS} else program

    def _steps(self, least: int, most: int, depth: int = 0) -> Steps:
        found: Steps = ()
        for _ in range(self._chance.randint(least, most)):
            if self._blocks and depth < 2 and self._chance.random() < 0.2:
                kind = self._chance.choice(self._blocks)
                if kind in self._grammar.helpers:
                    inner = self._some(self._grammar.helpers_steps, 1, 4)
                else:
                    inner = self._steps(0, 4, depth + 1)
                found += (do(kind, *inner),)
            else:
                found += self._chance.choice(self._chance.choice(self._fragments))
        return found

    def _some(self, fragments: list[Steps], least: int, most: int) -> Steps:
        found = (self._chance.choice(fragments) for _ in range(self._chance.randint(least, most)))
        return tuple(step for steps in found for step in steps)


def programs(grammar: Grammar = SESSIONS) -> st.SearchStrategy[Program]:
    """Any program, each out of a random of its own.

    Were each choice one of Hypothesis's, it would vary and repeat what it drew before: then rare steps
    hardly ever come, and few programs have another isolation level.
    """
    return st.randoms(use_true_random=True).map(lambda chance: Maker(chance, grammar).program())


def run_each(
    count: int, number: int, use: Callable[[Program], None], grammar: Grammar = SESSIONS
) -> None:
    """Give ``count`` programs to a function; ``number`` is the seed, the same makes the same ones."""

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(grammar))
    def run(program: Program) -> None:
        use(program)

    run()


# Made smaller


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 400) -> Program:
    """The smallest program found that still fails: nothing can be taken away from it."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for each in fields(Program):
        if getattr(program, each.name) != each.default:
            yield replace(program, **{each.name: each.default})
    for part in PARTS:
        for steps in _fewer(getattr(program, part)):
            yield replace(program, **{part: steps})


def _fewer(steps: Steps) -> Iterator[Steps]:
    """Without half of them, without one, or with one that is smaller."""
    half = len(steps) // 2
    if half > 1:
        yield steps[half:]
        yield steps[:half]
    for at, step in enumerate(steps):
        before, behind = steps[:at], steps[at + 1 :]
        yield before + behind
        if step.inner:
            yield before + step.inner + behind
            for inner in _fewer(step.inner):
                yield (*before, replace(step, arguments=inner), *behind)


def kinds_never_executed(executed: dict[str, int], grammar: Grammar = SESSIONS) -> list[str]:
    """Kinds of steps that no program has done."""
    return sorted(kind for kind in grammar.kinds if not executed.get(kind))
