"""Random programs: hypothesis draws them, and makes one that fails smaller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.differential.chosen import EITHER, EQUAL, REFUSED
from tests.differential.steps import COMMIT, READ, ROLLBACK, SHOW, Program, Row, Steps, do, texts

HELPERS: list[Steps] = [
    *((step,) for step in (READ, COMMIT, ROLLBACK, SHOW, do("keep a book"))),
    *((do("add", label),) for label in "bc"),
    (do("insert", "b"),),
    (do("add", "b"), COMMIT),
    *((do("lock", what),) for what in ("advisory at once", "row at once")),
    (do("set", "local tenant"),),
    *((step,) for step in texts("authors", "quoted function", "view")),
]

# By design a LOCAL setting from before the view outlives its first commit, all sessions of the view
# have the advisory locks that were taken before it, and a row's lock outlives a failed statement.
BEFORE: list[Steps] = [
    (READ,),
    (do("keep a book"),),
    (do("add", "b"),),
    (do("add", "b"), COMMIT),
    *((do("set", what),) for what in ("tenant", "mode", "read only")),
    (do("set", "mode"), COMMIT),
    (do("insert", "b"),),
    (READ, do("close")),
    (do("fail", "division"),),
    (do("choose", "schema"),),
    *((step,) for step in texts("quoted function", "function in a schema")),
    (do("read the kept book"), do("change the kept book", "price")),
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

# How often each comes is chosen by hand: one program in two is equal, and few are broken.
AROUND = ((), (), ("blocks",), ("blocks",), ("blocks", "helpers"), ("helpers",))
ANSWERS = ("created",) * 8 + ("conflict", "forbidden", "error", "raise")
CATCHES = ("database errors",) * 8 + ("nothing", "everything")
LEVELS = ("",) * 8 + ("REPEATABLE READ", "SERIALIZABLE")

DIFFERS = "conditional_savepoint", "one seat deferred", "a seat taken"  # by design

TOGETHER = list(
    dict.fromkeys(
        program.view[at : at + length]
        for programs in (EQUAL, EITHER, REFUSED)
        for program in programs.values()
        for length in (2, 3, 4)
        for at in range(len(program.view) - length + 1)
        if not any(each in str(program) for each in ("constraints immediate", *DIFFERS))
    )
)
"""Steps that come one behind the other in a chosen program."""


def sequences(fragments: Any, least: int, most: int) -> st.SearchStrategy[Steps]:
    """Some of these fragments, one behind the other."""
    return st.lists(fragments, min_size=least, max_size=most).map(lambda found: sum(found, ()))


@st.composite
def programs(draw: Any, rows: list[Row]) -> Program:
    """Any program. It draws on a few families only, so that some are all of one kind."""
    families: dict[str, list[list[Steps]]] = {}
    for row in rows:
        words = [(word,) for word in row.words if word not in DIFFERS] or [()]
        families.setdefault(row.family, []).append([(do(row.kind, *word),) for word in words])
    blocks = {name: [kind[0][0].kind for kind in families.pop(name)] for name in ("blocks", "helpers")}
    del families[""]
    always = [
        *families.pop("always"),
        *[[(COMMIT,), (COMMIT, READ)]] * 2,
        *([(do("add", label),)] for label in "abc"),
    ]
    few = st.lists(st.sampled_from(sorted(families)), max_size=4, unique=True)
    pools = [
        always,
        always,
        *(families[name] for name in draw(few)),
        *draw(st.sampled_from(([], [[TOGETHER]]))),
    ]
    around = [kind for name in draw(st.sampled_from(AROUND)) for kind in blocks[name]]

    def many(least: int, most: int, depth: int) -> st.SearchStrategy[Steps]:
        simple = st.sampled_from(pools).flatmap(st.sampled_from).flatmap(st.sampled_from)
        if not around or depth == 2:
            return sequences(simple, least, most)

        def block(kind: str) -> st.SearchStrategy[Steps]:
            is_helper = kind in blocks["helpers"]
            inner = sequences(st.sampled_from(HELPERS), 1, 4) if is_helper else many(0, 4, depth + 1)
            return inner.map(lambda steps: (do(kind, *steps),))

        either = st.integers(0, 4).flatmap(
            lambda number: st.sampled_from(around).flatmap(block) if number == 4 else simple
        )
        return sequences(either, least, most)

    def seldom(steps: list[Steps], *where: str) -> Steps:
        return draw(sequences(st.sampled_from(steps), 1, 2)) if draw(st.sampled_from(where)) else ()

    view = draw(many(1, 8, 0))
    at = draw(st.integers(0, len(view)))
    kinds = st.sampled_from([kind for found in families.values() for kind in found])
    chosen = draw(kinds.flatmap(st.sampled_from))  # so that a run has enough of each kind
    program = Program(
        (*view[:at], *chosen, *view[at:], *draw(st.sampled_from([(COMMIT,), (COMMIT,), ()]))),
        before=seldom(BEFORE, "", "", "", "", "here"),
        **{draw(st.sampled_from(("above", "after"))): seldom(ABOVE, "", "", "here")},
        answer=draw(st.sampled_from(ANSWERS)),
        catches=draw(st.sampled_from(CATCHES)),
        handler=draw(st.sampled_from(("", "", "plain", "rolls back"))),
        isolation=draw(st.sampled_from(LEVELS)),
        begins_above=draw(st.integers(0, 19)) == 19,
    )
    if program.kinds & {*blocks["helpers"]}:  # by design all sessions of a view have one snapshot
        program = replace(program, isolation="")
    if "in a savepoint of the connection" in program.kinds:  # by design a rollback above works
        program = replace(program, handler="", begins_above=False)
    return program
