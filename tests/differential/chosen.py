"""Chosen programs, and what is expected of each: what once was found, and what a rule makes.

``EQUAL`` must not even be refused. ``REFUSED`` must be, unless the plain application's sessions leave
nothing to refuse. Of ``EITHER``, whatever came before or is left to others, both is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.differential import manuals
from tests.differential.steps import (
    COMMIT,
    FAILURES,
    FLUSH,
    READ,
    ROLLBACK,
    SETTINGS,
    SHOW,
    Program,
    Step,
    Steps,
    do,
    texts,
)

EQUAL: dict[str, Program] = {}
REFUSED: dict[str, Program] = {}
EITHER: dict[str, Program] = {}


def adding_to(programs: dict[str, Program]) -> Callable[..., None]:
    def add(name: str, *view: Step, **around: Any) -> None:
        assert name not in programs, name
        programs[name] = Program(view=view, **around)

    return add


equal, refused, either = map(adding_to, (EQUAL, REFUSED, EITHER))


def nested(*inner: Step) -> Step:
    """What is undone when one of the steps fails."""
    return do("nested, first error ends it", *inner)


def undone(*inner: Step) -> Step:
    return do("nested, undone", *inner)


ADD, LATER, LAST = do("add", "a"), do("add", "b"), do("add", "c")
INSERT = do("insert", "a")
TWICE = ADD, COMMIT, LATER, COMMIT
ABORTED = (INSERT, INSERT)
"""The second breaks a unique constraint: the transaction is aborted, and the view goes on."""
ABOVE: Steps = (do("add", "z"), COMMIT)

# What is set, and where it ends

FOR_GOOD = ("tenant", "mode", "path", "role", "time-out")
LOCAL = ("local tenant", "local mode", "local path", "local role", "local time-out", "local zone")
LOCAL += ("local time-out for locks", "local time-out for idleness", "local asynchronous")
for what in (*FOR_GOOD, *LOCAL):
    setting = do("set", what)
    equal(f"{what}, and commits", setting, ADD, SHOW, COMMIT, SHOW, LATER, COMMIT, SHOW)
    equal(f"{what}, and a rollback", setting, ADD, FLUSH, ROLLBACK, SHOW, LATER, COMMIT, SHOW)
for what in LOCAL:
    setting = do("set", what)
    equal(f"{what}, in each transaction", setting, ADD, SHOW, COMMIT, setting, SHOW, LATER, COMMIT)
for what in ("local tenant", "mode", "local path", "local role"):
    setting, end = do("set", what), (SHOW, LATER, COMMIT, SHOW)
    equal(f"{what}, nested and kept", do("nested, kept", setting, ADD, SHOW), *end)
    equal(f"{what}, nested and undone", undone(setting, ADD, SHOW), *end)
for what in ("path", "local path", "role", "local role"):  # from there the record is not to be seen
    setting = do("set", what)
    equal(f"{what}, and a read", setting, READ)
    equal(f"{what}, and a rejection", setting, COMMIT, answer="conflict")
    equal(f"{what}, and an error", setting, ADD, FLUSH, answer="raise")
    equal(f"{what}, before the view", SHOW, ADD, COMMIT, SHOW, before=(setting,))
    equal(f"{what}, chosen with each transaction", *TWICE, READ, each=SETTINGS[what])
WRITE = do("ask", "insert into public.audit values ('x')")
equal("no path at all", do("set", "empty path"), WRITE, COMMIT)
equal("a role that is laid down", do("set", "role"), ADD, FLUSH, do("set", "no role"), LATER, COMMIT)
equal("local, and work above", do("set", "local tenant"), COMMIT, ADD, COMMIT, above=(LATER, COMMIT))
BY_ANOTHER = do("by a second session", do("set", "local tenant"), COMMIT)
equal("local, by a session inside one that has read", READ, ADD, BY_ANOTHER, COMMIT)
SET = do("set", "local tenant"), do("set", "mode")
equal("settings of a transaction that only read", *SET, SHOW, COMMIT, SHOW, ADD, COMMIT)
for end in ("remove", "close"):
    equal(f"settings and {end}", *SET, ADD, FLUSH, do(end), SHOW, LATER, COMMIT)
for what, steps in {
    "committed": (*SET, COMMIT),
    "rolled back": (*SET, ROLLBACK),
    "reset": (SET[0], do("ask", "reset all")),
    "for good": SET[1:],
}.items():
    equal(f"settings before the view, {what}", SHOW, ADD, COMMIT, SHOW, before=steps)
either("a setting before the view", ADD, COMMIT, before=SET[:1])
equal("a setting that was there", do("set", "local, default"), COMMIT, SHOW, COMMIT)
SCHEMA = do("choose", "schema"), INSERT
equal("a translated schema until the commit", *SCHEMA, COMMIT, do("insert", "b"), COMMIT)
equal("a translated schema until the rollback", *SCHEMA, ROLLBACK, do("insert", "b"), COMMIT)
either("a translated schema before the view", ADD, COMMIT, LATER, COMMIT, before=SCHEMA[:1])
either("a translated schema after the view", SCHEMA[0], above=(do("insert", "z0"), COMMIT))
equal("an option until the commit", do("choose", "streams"), READ, COMMIT, READ, ADD, COMMIT)
refused(
    "a translated schema from before the view, and a session of its own reads",
    *(do("in a session of its own", SHOW), INSERT, COMMIT),
    before=SCHEMA[:1],
)
for what in ("read only", "serializable"):
    either(f"{what} in the view", do("set", what), READ, COMMIT, ADD, COMMIT)
    either(f"{what} before the view", ADD, COMMIT, before=(do("set", what),))
either("serializable by option", do("choose", "serializable"), ADD, COMMIT)
either("read only, and another session", do("set", "read only"), BY_ANOTHER, ADD, COMMIT)

# Tables, cursors, channels, statements and locks of the connection


def there(sql: str) -> Step:
    return do("for a connection", sql)


MAKE, FILL = do("make a temporary table", "for good"), do("fill the temporary table")
LOOK, DROP = do("read the temporary table"), there("drop table if exists pg_temp.scratch")
equal("a temporary table", MAKE, FILL, LOOK, COMMIT, LOOK, ROLLBACK, ADD, COMMIT, DROP, COMMIT)
equal("a temporary table that stays", MAKE, FILL, LOOK, ADD, COMMIT)
either(
    "another role, and a temporary table emptied by a commit",
    *(do("make a temporary table", "for a transaction"), do("set", "role"), COMMIT),
)
HOLD = there("declare kept cursor with hold for select label from item order by 1")
FETCH, CLOSE = there("fetch 1 from kept"), there("close kept")
LEFT = there("select array_agg(name) from pg_cursors where name <> ''")
equal("a cursor with hold", HOLD, ADD, COMMIT, FETCH, CLOSE, COMMIT)
equal("a cursor with hold in later ones", HOLD, COMMIT, FETCH, ADD, COMMIT, FETCH, ROLLBACK, LEFT)
equal("a cursor with hold, rolled back", HOLD, ROLLBACK, LEFT, ADD, COMMIT)
equal("a cursor with hold before the view", FETCH, ADD, COMMIT, CLOSE, COMMIT, before=(HOLD, COMMIT))
equal("a channel", there("listen news"), ADD, COMMIT)
PREPARE = there("prepare pay (text) as insert into item (label, amount) values ($1, 1)")
PAY, AGAIN = there("execute pay ('a')"), there("execute pay ('b')")
equal("a prepared statement", there("deallocate all"), PREPARE, PAY, COMMIT, AGAIN, COMMIT)
LOCK, UNLOCK = do("lock", "advisory for good"), do("ask", "select pg_advisory_unlock(8)")
equal("an advisory lock of the connection", LOCK, ADD, COMMIT, UNLOCK, COMMIT)
equal("an advisory lock of the connection that stays", LOCK, ADD, COMMIT)
either("an advisory lock of the connection before the view", ADD, COMMIT, UNLOCK, before=(LOCK, COMMIT))
STREAM, NEXT = do("open a stream"), do("read the stream")
either("a stream after a commit", STREAM, COMMIT, NEXT)
equal("a named cursor after a failure", *ABORTED, do("driver", "named"), ROLLBACK, ADD, COMMIT)
either("a stream read after its unit was rolled back", STREAM, ROLLBACK, NEXT, ROLLBACK, READ)

# What fails costs what it costs without us

TEXTS = "function that fails", "trigger that refuses", "write, then fail", "no column", "duplicate"
for door in ("text", "cursor"):
    for name in (*TEXTS, "call that commits", "concurrently", "vacuum", "a seat taken"):
        failure = do(door, name)
        either(
            f"{door}, {name}, caught",
            *(ADD, nested(LATER, failure), do("savepoint"), failure, do("undo the savepoint")),
            *(COMMIT, failure, ROLLBACK, LAST, COMMIT, failure, COMMIT),
        )
for how in FAILURES:
    failure = do("fail", how)
    equal(
        f"{how}, caught",
        *(ADD, FLUSH, nested(LATER, FLUSH, failure), undone(LATER), nested(failure), COMMIT),
        *(failure, ROLLBACK, do("nested, kept", LATER), SHOW, COMMIT),
        *(LAST, FLUSH, failure, ROLLBACK, do("add", "e"), COMMIT),
    )
    if how != "conflict":  # which is a 503
        equal(f"{how}, not caught", ADD, FLUSH, failure, COMMIT, catches="nothing")
CONFLICT = do("fail", "conflict")
either("a conflict that nobody catches", ADD, FLUSH, CONFLICT, catches="nothing")
either("a conflict that is answered", ADD, FLUSH, CONFLICT, answer="conflict")
for what, steps in {
    "a commit that PostgreSQL makes a rollback": (*ABORTED, COMMIT, READ),
    "a nested begin in an aborted transaction": (*ABORTED, nested(LAST)),
    "an error inside a nested begin that goes on": (do("nested, kept", *ABORTED), READ),
    "releasing an aborted savepoint": (do("savepoint"), *ABORTED, do("release the savepoint"), READ),
}.items():
    either(what, *steps)
    either(f"{what}, and a commit above", *steps, above=ABOVE)
equal(
    "the connection of a transaction that has failed",
    *(do("text", "release"), do("in a savepoint of the connection", do("insert by connection", "c"))),
    *(SCHEMA[0], ROLLBACK, ADD, COMMIT),
)
either(
    "a refusal that the view catches, in a transaction that fails",
    *(do("fail", "unique"), LATER, do("in a session of its own", do("lock", "row at once"))),
    catches="everything",
    begins_above=True,
)

# Constraints that are asked at the commit

TAKE = do("text", "a parent missing")
for take in (TAKE, do("cursor", "a parent missing")):
    what = f"{take.kind} that breaks one"
    equal(f"{what}, caught and gone on", ADD, take, COMMIT, ROLLBACK, LATER, COMMIT)
    equal(f"{what}, answered", ADD, COMMIT, take, COMMIT, ROLLBACK, answer="conflict")
    equal(f"{what}, not caught", ADD, take, COMMIT, catches="nothing")
    equal(f"{what}, nested", do("nested, kept", take), COMMIT, ROLLBACK, LATER, COMMIT)
    either(f"{what}, committed above", ADD, take, above=(COMMIT,))
    either(f"{what}, committed after", ADD, take, after=(COMMIT,))
    either(f"{what}, around a rejection", take, answer="forbidden", begins_above=True)
RIGHT = (TAKE, do("text", "the parent"), COMMIT)
WRONG = do("ask", "delete from node where name = 'x'"), COMMIT
equal("a constraint that is right at the commit only, twice", *RIGHT, *WRONG, *RIGHT)
AT_ONCE = undone(do("set", "constraints immediate"))
equal("constraints asked at once, undone", AT_ONCE, TAKE, ADD, FLUSH, ROLLBACK, LATER, COMMIT)
DEFER, SWAP, TAKEN = texts("one seat deferred", "seats swapped", "a seat taken")
either("a constraint that the view defers", DEFER, TAKEN, COMMIT, ROLLBACK, ADD, COMMIT)
equal("a constraint that the view defers and mends", DEFER, SWAP, ADD, COMMIT)

# What is rolled back is free for others

DEBIT, ELSEWHERE = do("count up"), do("count up by engine")
for lock in (DEBIT, do("lock", "row"), do("lock", "table"), do("text", "function that locks a row")):
    what = " ".join((lock.kind, *lock.arguments))
    equal(f"{what}, rolled back", lock, ROLLBACK, ELSEWHERE, ADD, COMMIT)
    equal(f"{what}, rolled back in a nested transaction", ADD, undone(lock), ELSEWHERE, COMMIT)
equal("an advisory lock rolled back", do("lock", "advisory"), ROLLBACK, do("read locks"), ADD, COMMIT)
for what, steps in {
    "a nested transaction failed": (nested(DEBIT, do("fail", "division")),),
    "a statement failed": (DEBIT, do("fail", "unique"), ROLLBACK),
    "a value could not be bound": (DEBIT, do("fail", "NUL"), ROLLBACK),
    "the session was closed": (DEBIT, do("close")),
    "the session was removed": (DEBIT, do("remove")),
    "a helper did not commit": (do("in a helper's context", DEBIT),),
    "the outer of two was undone": (undone(do("nested, kept", DEBIT)),),
}.items():
    equal(f"a row is free where {what}", *steps, ELSEWHERE, ADD, COMMIT)
either("a snapshot from before another connection", ELSEWHERE, DEBIT, isolation="REPEATABLE READ")

# Two sessions

WORK: dict[str, Steps] = {
    "a flush": (ADD, FLUSH),
    "a flush of a change": (do("modify", "old"), FLUSH),
    "core": (INSERT,),
    "many by core": (do("insert many", "b"),),
    "an update by ORM": (do("update by ORM", "old"),),
    "the connection": (do("insert by connection", "a"),),
    "a row's lock": (do("lock", "row"),),
    "an advisory lock": (do("lock", "advisory"),),
    "a nested transaction that was kept": (do("nested, kept", ADD),),
    "an open nested transaction": (do("savepoint"), ADD, FLUSH),
    "a local setting": (do("set", "local tenant"),),
    "a notification": (do("text", "notify"),),
    "a function": (do("text", "quoted function"),),
}
HELPER = "in a helper's context"
SECONDS: dict[str, Step] = {
    "a helper reads": do(HELPER, READ),
    "a helper writes": do(HELPER, LAST, COMMIT),
    "a helper does not commit": do(HELPER, LAST, FLUSH),
    "a helper rolls back": do(HELPER, LAST, FLUSH, ROLLBACK),
    "a session of its own reads": do("in a session of its own", READ),
    "a session of its own writes": do("in a session of its own", LAST, COMMIT),
    "a helper in a helper reads": do(HELPER, do(HELPER, READ)),
}
READS = SECONDS["a helper reads"]
HIDDEN = {
    f"{name} that writes, {what}": Program((do("text", name), *steps), after=(COMMIT,))
    for name in ("view", "operator", "an overloaded name")
    for what, steps in {"committed after": (), "and a helper reads": (READS,)}.items()
}
HIDDEN["view in a query that writes, undone"] = Program((ADD, COMMIT, do("read the view"), ROLLBACK))
"""Where reads may write: equal or refused."""
for name in manuals.TEXTS["effects"]:  # whoever takes one for a read loses it
    either(f"{name}, and a helper reads", do("text", name), READS, READ, LATER, COMMIT)
for what, work in WORK.items():
    refused(f"{what}, and a helper reads", *work, READS, READ, LATER, COMMIT)
    if "notification" not in what and "lock" not in what:
        equal(f"{what} and a commit, and a helper reads", *work, COMMIT, READS, LATER, COMMIT)
for what, second in SECONDS.items():
    refused(f"core, then {what}", INSERT, second, READ, LATER, COMMIT)
    equal(f"a read, and {what}", READ, second, READ, LATER, COMMIT)
    equal(f"core and a commit, then {what}", INSERT, COMMIT, second, READ, LATER, COMMIT)
    equal(f"{what} inside a nested transaction", do("nested, kept", READ, second, INSERT), COMMIT)
equal("what was rolled back, and a helper reads", INSERT, ROLLBACK, READS, ADD, COMMIT)
equal("what was undone, and a helper reads", undone(INSERT), COMMIT, READS, ADD, COMMIT)
TURN = COMMIT, SECONDS["a helper rolls back"], READS
equal("helpers in turns", ADD, *TURN, LATER, *TURN, LAST, *TURN)
SECOND = "by a second session"
for what in ("row", "advisory"):
    second = do(SECOND, do("lock", f"{what} at once"))
    either(f"a lock that a second session must not get, {what}", do("lock", what), second)
either("a local setting beside a second session", do(SECOND, SET[0]), READ, do(SECOND, LATER, READ))
either("a second session commits", do("update by ORM", "old"), do(SECOND, LATER, COMMIT), COMMIT)
ENDED = do("delete", "old"), do("by a connection", "commit")
refused("a deletion inside with session.begin()", *ENDED, after=(COMMIT,), begins_above=True)
for END in ("to savepoint", "release"):
    refused(f"{END} from before", ADD, *texts(END), COMMIT, before=texts("savepoint"))
refused("a rollback around what a second session has written", READ, do(SECOND, LATER, FLUSH), ROLLBACK)
POINT, TO_POINT = texts("savepoint", "to savepoint")
either("a savepoint by text, and another session", POINT, do(SECOND, READ), TO_POINT)
for block in ("nested, kept", "in a savepoint of the connection"):
    for door in ("text", "cursor"):
        for end in ("to savepoint", "release"):
            ended = do(block, do(door, end))
            equal(f"{block}, and ended, {door} {end}", POINT, ended, TO_POINT, ADD, COMMIT)
equal("an error in a nested begin, and a commit", do("nested, kept", *ABORTED), COMMIT, ADD, COMMIT)
FAILED_FLUSH = do("add several", "a"), do("add several", "a"), FLUSH
either("a helper beside a failed flush", *FAILED_FLUSH, do(HELPER, do("keep a book")), READ)
equal("the engine beside uncommitted work", ADD, FLUSH, do("write an audit by engine", "x"), COMMIT)

# Before the view, beside ``tests/integration/session/test_before_the_view.py``

CHANGE = do("keep a book"), do("change the kept book", "price")
for what, steps in {
    "a change that is not flushed": CHANGE,
    "an object that is added": (LATER,),
    "a write": (do("insert", "b"),),
    "a write by a function": texts("quoted function"),
    "a commit": (LATER, COMMIT),
    "a nested transaction that failed": (nested(LATER, do("fail", "unique")),),
    "a savepoint as text that was undone": texts("savepoint", "trigger that writes", "to savepoint"),
}.items():
    equal(f"{what} before the view", ADD, COMMIT, LAST, COMMIT, before=steps)
    equal(f"{what} before a view that rolls back", ROLLBACK, ADD, COMMIT, before=steps)
    either(f"{what} before the view, and a commit after it", ADD, before=steps, after=(COMMIT,))
    either(f"{what} before a rejection", ROLLBACK, before=steps, answer="conflict")
equal("a change to an object from before the view", CHANGE[1], COMMIT, before=CHANGE[:1])
OUT = do("state of the kept book", "expunge")
equal("a detached object from before the view", OUT, CHANGE[1], ADD, COMMIT, before=CHANGE[:1])
either("an error before the view", before=(do("fail", "division"),))
either("a failed flush before the view", ADD, COMMIT, before=FAILED_FLUSH)
for level in ("REPEATABLE READ", "SERIALIZABLE"):
    equal(f"no read before the view at {level}", SHOW, ADD, COMMIT, SHOW, isolation=level)
    equal(f"a read that was undone at {level}", *TWICE, isolation=level, before=(READ, ROLLBACK))
    refused(f"a read before the view at {level}", *TWICE, isolation=level, before=(READ,))

# Who commits what the view wrote, and who fails up there

WROTE: dict[str, Steps] = {
    "flushed": (ADD, FLUSH),
    "pending": (ADD,),
    "by core": (INSERT,),
    "in a nested transaction": (do("nested, kept", ADD),),
    "by a function": texts("function"),
    "by a cursor": (do("cursor", "function"),),
    "partly committed": (ADD, COMMIT, LATER, FLUSH),
    "committed": (ADD, COMMIT),
}
for what, steps in WROTE.items():
    for where in ("above", "after"):
        equal(f"{what}, committed {where}", *steps, **{where: (COMMIT,)})
        equal(f"{what}, and a row of its own {where}", *steps, **{where: ABOVE})
        either(f"{what}, rolled back {where}", *steps, **{where: (ROLLBACK,)})
        either(f"{what}, read {where}", *steps, **{where: (READ,)})
        either(f"{what}, failed {where}", *steps, **{where: (do("raise"),)})
        either(f"{what}, an error undone {where}", *steps, **{where: (undone(LAST), COMMIT)})
    if "commit" not in what or what == "committed":
        equal(f"{what}, inside with session.begin()", *steps, begins_above=True)
    for answer in ("conflict", "forbidden", "error", "raise"):
        equal(f"{what}, and {answer}", *steps, answer=answer)
        either(f"{what}, and {answer}, committed after", *steps, answer=answer, after=(COMMIT,))
    for handler in ("plain", "rolls back"):
        raises: Any = {"answer": "raise", "handler": handler, "after": (COMMIT,)}
        either(f"{what}, an error, a handler that is {handler}", *steps, **raises)
    if what != "committed":
        refused(f"{what}, and nobody commits", *steps)
for what in ("modify", "delete"):  # nothing was sent yet
    refused(f"{what}, and nobody commits", do(what, "old"))
either("a unique label that is taken, found above", ADD, FLUSH, do("add", "old"), above=(COMMIT,))
either("a commit that failed, and one above", LAST, LAST, COMMIT, above=ABOVE)
MET = do("ask", "insert into item (label, amount) values ('old', 1) on conflict do nothing")
for what, step in {
    "an update of no rows": do("update", "nobody"),
    "a delete of no rows": do("delete by core", "nobody"),
    "an insert that met a conflict": MET,
    "what a nested transaction undid": nested(LAST, do("fail", "unique")),
    "what a nested transaction undid by hand": undone(LAST),
}.items():
    equal(f"{what} needs no commit", step)
    equal(f"{what} after a commit", ADD, COMMIT, step)
either("what was undone as text", *texts("savepoint", "trigger that writes", "to savepoint"))
for name in ("before_commit", "before_flush", "after_flush"):
    veto: Any = {"vetoes": name, "catches": "everything"}
    equal(f"a listener that refuses {name}", ADD, COMMIT, ROLLBACK, READ, answer="conflict", **veto)
    equal(f"a listener that refuses {name}, uncaught", ADD, COMMIT, vetoes=name)

# Ends that are not ours: ``tests/integration/session/test_commits_that_are_not_ours.py``.

for mode in ("conditional_savepoint", "rollback_only"):
    joined = do("a session on the connection", mode)
    equal(f"{joined.kind}, {mode}", ADD, FLUSH, joined, ROLLBACK, LATER, COMMIT)
for text in ("block", "block that commits", "vacuum", "call", "call that commits", "two statements"):
    equal(text, ADD, FLUSH, do("driver SQL", text), LATER, COMMIT)
