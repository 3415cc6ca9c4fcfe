"""A second grammar: views as the manuals of SQLAlchemy, psycopg and PostgreSQL would have them.

It was written from those manuals and knows nothing of how the extension works: where the first grammar
(:mod:`tests.differential.programs`) repeats a few steps in every order, this one has many kinds, each
as its manual shows it.
"""

from __future__ import annotations

from tests.differential import documented_core as core
from tests.differential import documented_orm as by_orm
from tests.differential.programs import ABOVE, BEFORE, BLOCKS, HELPERS_STEPS, Grammar, Steps, each
from tests.differential.steps import FAILURES, Step, do

COMMIT, ROLLBACK, FLUSH = (do("commit"),), (do("rollback"),), (do("flush"),)


def pairs(kind: str, first: tuple[str, ...], second: tuple[str, ...]) -> list[Steps]:
    """One fragment for each pair of words."""
    return [(do(kind, one, other),) for one in first for other in second]


def texts(*names: str) -> list[Steps]:
    """Each text by the session, by SQL of the driver, and by its cursor."""
    return [(do(kind, name),) for name in names for kind in ("text", "text", "driver SQL", "cursor")]


def ends_of(failure: Step) -> list[Steps]:
    """An error, and what a view does next."""
    return [
        (failure, do("rollback")),
        (failure,),
        (failure, do("commit")),
        (do("nested, first error ends it", do("text", "trigger that writes"), failure),),
        (do("nested, kept", failure, do("text", "read")),),
        (do("savepoint"), failure, do("undo the savepoint")),
        (do("commit"), failure, do("rollback"), do("write an author", "Late"), do("commit")),
    ]


_names = list(core.TEXTS)


def _between(first: str, last: str) -> tuple[str, ...]:
    return tuple(_names[_names.index(first) : _names.index(last) + 1])


EFFECTS = _between("function", "trigger that refuses")
_WRITES = _between("CTE that moves", "returning")
_SETTINGS = tuple(name for name in _between("set local", "who") if name not in core.FOR_GOOD)
_SLOTS, _VALUES = tuple(core.SLOTS), tuple(core.VALUES)

FRAGMENTS: dict[str, list[Steps]] = {
    "relationships": [
        *each("write an author", "Eliot", "Noted"),
        *each("write a book", "new", "evented", "invalid"),
        *each("delete an author", "Austen", "Bronte"),
        *each("tag a book", "new", "newest"),
        *each("tag by a proxy", "new", "by proxy"),
        *each("composite", 1, 2),
        *each("inherit", "a", "b"),
        *each("read polymorphic", "with", "selectin"),
        *each("get", "plain", "options", "for update", "missing", "None"),
        *[
            (do(kind),)
            for kind in (
                *("write a book that does not cascade", "orphan a book", "give a book away"),
                *("untag a book", "write a letter only", "grow the tree", "a cycle of two"),
                *("a child of nobody", "the parent comes later", "rename a natural key"),
                *("swap a unique key", "change a composite", "change the inherited"),
                *("delete the inherited", "read computed", "copy by query"),
            )
        ],
        (do("a child of nobody"), do("commit")),
        (do("a child of nobody"), do("flush"), do("the parent comes later"), do("commit")),
    ],
    "loading": [
        *each("load books", *by_orm.LOADS),
        *each("iterate", *by_orm.STREAMS),
        (do("iterate", "left early"), do("commit"), do("read the kept book")),
    ],
    "states": [
        (do("keep a book"),),
        (do("read the kept book"),),
        *each("change the kept book", "price", "expression", "negative", "title", "invalid"),
        *each("refresh the kept book", "plain", "for update", "nowait", "attribute"),
        *each(
            "state of the kept book",
            *("expire", "expire one", "expunge", "add again", "delete", "merge"),
            *("merge without load", "transient", "transient to detached", "look"),
        ),
        (do("look at the session"),),
        (do("look at the transaction"),),
        (do("be overtaken"),),
        (do("be overtaken"), do("rollback")),
        *each("lose a row", "refresh", "expire", "delete", "update"),
        (do("change the kept book", "price"), do("commit"), do("read the kept book")),
        (do("change the kept book", "expression"), do("rollback"), do("read the kept book")),
        (do("reset the session"),),
        (do("expunge everything"),),
        (do("begin twice"),),
        (do("the scoped session"),),
        (do("what listeners heard"),),
        *each(
            "a session on the connection",
            *("create_savepoint", "conditional_savepoint", "rollback_only"),
        ),
    ],
    "bulk": [
        *each(
            "bulk",
            *("insert", "returning", "expressions", "mappings", "update", "update mappings"),
            *("many", "none", "fails"),
        ),
        *each("update by class", "auto", "fetch", "evaluate", False, "returning"),
        *each("delete by class", "auto", "fetch", "evaluate", False),
        *each("upsert", "nothing", "nothing at all", "update"),
        (do("upsert twice"),),
        (do("upsert", "update"), do("commit"), do("load books", "joined")),
    ],
    "core": [
        *each("by Core", *core.BY_CORE),
        *each("by a connection", *core.BY_CONNECTION),
        *each("expanding", (), (1775,), (None,), (1775, None), (1, 2, 1816)),
        *each("expanding by Core", (), (1775,), (None,), (1775, None)),
        *each("literal", "it's", "%s", "\\", ""),
        (do("forget a value"),),
    ],
    "values": [
        *pairs("bind", _SLOTS, _VALUES),
        *pairs("bind by SQL", _SLOTS, _VALUES),
        *pairs("bind in text", _SLOTS, _VALUES),
        *pairs(
            "measure",
            ("number", "amount", "payload", "document", "many", "colour", "token", "day"),
            _VALUES,
        ),
    ],
    "one slot": [  # a statement that was good, and now is none
        (
            do("bind", slot, "int"),
            do("write an author", "Before"),
            do("commit"),
            do("bind", slot, value),
            do("rollback"),
            do("commit"),
        )
        for slot in _SLOTS
        for value in _VALUES
    ]
    + [
        (
            do("bind", slot, "one tuple"),
            do("text", "trigger that writes"),
            do("commit"),
            do("bind", slot, value),
            do("rollback"),
        )
        for slot in _SLOTS
        for value in ("empty tuple", "tuple of None", "tuple of texts", "list", "None", "text", "dict")
    ],
    "effects": [
        *texts(*EFFECTS),
        *each(
            "function by Core",
            *("plain", "schema", "quoted", "both", "operator", "cast", "locks", "setting"),
            *("role", "view", "scalar"),
        ),
    ],
    "effects and others": [  # whoever takes the effect for a read loses it here
        (*effect, other)
        for effect in [
            *[(do("text", name),) for name in EFFECTS],
            *each("function by Core", "plain", "schema", "quoted", "both", "operator", "view"),
        ]
        for other in (
            do("in a session of its own", do("read")),
            do("in a helper's context", do("read")),
            do("by a second session", do("add", "b"), do("commit")),
            do("commit"),
            do("rollback"),
        )
    ],
    "writes": texts(*_WRITES),
    "settings": [
        *texts(*_SETTINGS),
        (do("text", "set local"), do("text", "trigger that writes"), do("commit"), do("text", "show")),
        (do("text", "clerk"), do("text", "policy"), do("commit"), do("text", "who")),
        (do("text", "set_config nested"), do("rollback"), do("text", "show")),
    ],
    "locks": [
        *texts(*_between("lock table", "for share")),
        (do("text", "function that locks a row"), do("rollback"), do("count up by engine")),
        (do("text", "function that locks"), do("rollback"), do("read locks")),
    ],
    "constraints": [
        *texts(*_between("seats swapped", "a place twice")),
        (do("text", "one seat deferred"), do("text", "a seat taken"), do("commit")),
        (do("text", "a parent missing"), do("text", "the parent"), do("commit")),
        (do("text", "a parent missing"), do("commit")),
        (do("text", "all deferred"), do("text", "a seat taken"), do("text", "one seat immediate")),
    ],
    "savepoints": [
        *texts(*_between("savepoint", "back and more")),
        (do("text", "savepoint"), do("text", "duplicate"), do("text", "to savepoint")),
        (do("text", "savepoint quoted"), do("flush"), do("text", "to savepoint quoted")),
        (do("savepoint"), do("text", "function"), do("undo the savepoint")),
        (do("savepoint"), do("text", "function"), do("release the savepoint")),
    ],
    "server": [
        *texts(*_between("notify", "unlink")),
        *each("temporary", *core.TEMPORARY),
        *each("use the temporary", *core.READ_TEMPORARY),
        *each("for good", *core.PREPARED),
        (do("for good", "prepare"), do("for good", "execute"), do("commit")),
        (do("for good", "prepare a function"), do("for good", "execute a function")),
        (
            do("for good", "hold"),
            do("commit"),
            do("for good", "fetch held"),
            do("for good", "close held"),
        ),
        (do("text", "declare"), do("commit"), do("text", "fetch")),
        (do("text", "declare a write"), do("text", "fetch a write"), do("commit")),
    ],
    "reads": texts(*_between("read", "literals")),
    "failures": [
        *[steps for name in core.FAILING for steps in ends_of(do("text", name))],
        *[steps for name in core.FAILING for steps in ends_of(do("cursor", name))],
        *[steps for name in by_orm.FAILURES for steps in ends_of(do("fail by ORM", name))],
        *[steps for name in FAILURES for steps in ends_of(do("fail", name))],
        *ends_of(do("upsert twice")),
        *ends_of(do("be overtaken")),
        *ends_of(do("forget a value")),
    ],
    "engine": [
        *each("write an audit by engine", "x"),
        *each("audit by a session of the engine", "y"),
    ],
}

ALWAYS: list[Steps] = [
    COMMIT,
    COMMIT,
    COMMIT,
    ROLLBACK,
    FLUSH,
    (do("write an author", "Woolf"),),
    (do("write a book", "Waves"),),
    (do("text", "journal"),),
    (do("text", "read"),),
    (do("load books", "lazy"),),
    (do("by Core", "insert from select"),),
    (do("text", "function"), do("commit")),
]

MORE_BEFORE: list[Steps] = [
    *each("text", "read", "calm view", "quoted function"),
    *each("text", "function in a schema", "view", "operator"),
    *each("load books", "joined"),
    (do("keep a book"),),
    (do("keep a book"), do("change the kept book", "price")),
    (do("iterate", "left early"),),
]
MORE_ABOVE: list[Steps] = [
    *each("text", "journal", "show"),
    (do("text", "function above"), do("commit")),
    (do("read the kept book"),),
]

OWN_BLOCKS = (
    *("nested, then its own rollback", "nested, then its own commit", "no autoflush", "autoflush off"),
    "in a savepoint of the connection",
)


def documented(driver: str = "psycopg2") -> Grammar:
    """The grammar, with what the manual of this driver has."""
    of_driver = [(do("driver", driver, name),) for name in core.OF_DRIVER[driver]]
    pieces = [
        *of_driver,
        *((*steps, do("commit")) for steps in of_driver),
        *((*steps, do("rollback")) for steps in of_driver),
    ]
    return Grammar(
        {**FRAGMENTS, "driver": pieces},
        ALWAYS,
        families=(1, 1, 2, 2, 3, 4),
        blocks=(*BLOCKS, *OWN_BLOCKS),
        helpers_steps=[*HELPERS_STEPS, *each("text", "read", "quoted function", "function", "view")],
        before=[*BEFORE, *MORE_BEFORE],
        above=[*ABOVE, *MORE_ABOVE],
    )
