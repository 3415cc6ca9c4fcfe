"""Programs that a rule makes: each setting at each end, each failure, each work beside each session.

Those of :data:`EQUAL` must not even be refused. Those of :data:`REFUSED` must be, unless the plain
application's sessions leave nothing to refuse.
"""

from __future__ import annotations

from tests.differential.programs import Program
from tests.differential.steps import FAILURES, Step, do

ADD, LATER, LAST = do("add", "a"), do("add", "b"), do("add", "c")
COMMIT, ROLLBACK, FLUSH, READ = do("commit"), do("rollback"), do("flush"), do("read")
SHOW = do("read settings")

Steps = tuple[Step, ...]

EQUAL: dict[str, Program] = {}
REFUSED: dict[str, Program] = {}


def equal(name: str, *view: Step, **around: object) -> None:
    EQUAL[name] = Program(view=view, **around)  # type: ignore[arg-type]


def nested(*inner: Step) -> Step:
    """What is undone when one of the steps fails."""
    return do("nested, first error ends it", *inner)


def undone(*inner: Step) -> Step:
    return do("nested, undone", *inner)


# What is set, and where it ends

FOR_GOOD = ("tenant", "mode", "path", "role", "time-out")
LOCAL = ("local tenant", "local mode", "local path", "local role", "local time-out", "local zone")
LOCAL += ("local time-out for locks", "local time-out for idleness", "local asynchronous")
for what in (*FOR_GOOD, *LOCAL):
    setting = do("set", what)
    equal(f"{what}, and commits", setting, ADD, SHOW, COMMIT, SHOW, LATER, COMMIT, SHOW)
for what in LOCAL:
    setting = do("set", what)
    equal(f"{what}, and a commit", setting, ADD, SHOW, COMMIT)
    equal(f"{what}, in each transaction", setting, ADD, SHOW, COMMIT, setting, SHOW, LATER, COMMIT)
for what in (*FOR_GOOD, "local tenant"):
    setting = do("set", what)
    equal(f"{what}, and a rollback", setting, ADD, FLUSH, ROLLBACK, SHOW, LATER, COMMIT, SHOW)
for what in ("local tenant", "mode", "local time-out", "local path", "local role"):
    setting, end = do("set", what), (SHOW, LATER, COMMIT, SHOW)
    equal(f"{what}, nested and kept", do("nested, kept", setting, ADD, SHOW), *end)
    equal(f"{what}, nested and undone", undone(setting, ADD, SHOW), *end)
OUT_OF_SIGHT = [do("set", what) for what in ("path", "local path", "role", "local role")]
OUT_OF_SIGHT.append(do("send", "select set_config('search_path', 'elsewhere, public', true)"))
for setting in OUT_OF_SIGHT:  # from there the record is not to be seen
    what = " ".join((setting.kind, *setting.arguments))
    equal(f"{what}, and a read", setting, READ)
    equal(f"{what}, and a rejection", setting, COMMIT, answer="conflict")
    equal(f"{what}, and an error", setting, ADD, FLUSH, answer="raise")
equal("a role that is laid down", do("set", "role"), ADD, FLUSH, do("set", "no role"), LATER, COMMIT)
equal("local, and work above", do("set", "local tenant"), COMMIT, ADD, COMMIT, above=(LATER, COMMIT))
BY_ANOTHER = do("by a second session", do("set", "local tenant"), COMMIT)
equal("local, by a session inside one that has read", READ, ADD, BY_ANOTHER, COMMIT)
equal("committed inside", do("nested, kept", do("set", "local tenant"), COMMIT), ADD, COMMIT)
SET = do("set", "local tenant"), do("set", "mode")
equal("settings of a transaction that only read", *SET, SHOW, COMMIT, SHOW, ADD, COMMIT)
equal("settings when the session is removed", *SET, ADD, FLUSH, do("remove"), SHOW, LATER, COMMIT)
equal("settings when the session is closed", *SET, ADD, FLUSH, do("close"), SHOW, LATER, COMMIT)
equal("settings before an error", *SET, ADD, FLUSH, answer="raise")
equal("settings committed with a rejection", *SET, COMMIT, answer="conflict")
SHOWN = (SHOW, ADD, COMMIT, SHOW)
for what in FOR_GOOD:
    equal(f"{what}, before the view", *SHOWN, before=(do("set", what),))
for what, steps in {
    "committed": (*SET, COMMIT),
    "rolled back": (*SET, ROLLBACK),
    "reset": (SET[0], do("send", "reset all")),
}.items():
    equal(f"settings before the view, {what}", *SHOWN, before=steps)
DEFAULT = do("send", "set local lock_timeout to default")
equal("a setting that was there", DEFAULT, COMMIT, SHOW, COMMIT)
TRANSLATED = do("translate the schema"), do("insert", "a")
equal("a translated schema until the commit", *TRANSLATED, COMMIT, do("insert", "b"), COMMIT)
equal("a translated schema until the rollback", *TRANSLATED, ROLLBACK, do("insert", "b"), COMMIT)

REFUSED["a translated schema from before the view, and a session of its own reads"] = Program(
    view=(do("in a session of its own", SHOW), do("insert", "a"), COMMIT), before=TRANSLATED[:1]
)

equal(
    "the connection of a transaction that has failed",
    do("send", "release savepoint s1"),
    do("insert in a savepoint of the connection", "c"),
    *(TRANSLATED[0], ROLLBACK, ADD, COMMIT),
)

# Tables, cursors, channels, statements and locks of the connection

make, fill = do("make a temporary table", "for good"), do("fill the temporary table")
look, drop = do("read the temporary table"), do("send", "drop table if exists pg_temp.scratch")
equal("a temporary table", make, fill, look, COMMIT, look, ROLLBACK, ADD, COMMIT, drop, COMMIT)
equal("a temporary table that stays", make, fill, look, ADD, COMMIT)
HOLD = do("send", "declare kept cursor with hold for select label from item order by 1")
FETCH, CLOSE = do("ask", "fetch 1 from kept"), do("send", "close kept")
LEFT = do("ask", "select array_agg(name) from pg_cursors where name <> ''")
equal("a cursor with hold", HOLD, ADD, COMMIT, FETCH, CLOSE, COMMIT)
equal(
    "a cursor with hold in later transactions", HOLD, COMMIT, FETCH, ADD, COMMIT, FETCH, ROLLBACK, LEFT
)
equal("a cursor with hold, rolled back", HOLD, ROLLBACK, LEFT, ADD, COMMIT)
equal("a channel", do("listen"), ADD, COMMIT)
PREPARE = do("send", "prepare pay (text) as insert into item (label, amount) values ($1, 1)")
PAY, AGAIN = do("send", "execute pay ('a')"), do("send", "execute pay ('b')")
equal("a prepared statement", do("send", "deallocate all"), PREPARE, PAY, COMMIT, AGAIN, COMMIT)
LOCK, UNLOCK = do("lock", "advisory for good"), do("ask", "select pg_advisory_unlock(8)")
equal("an advisory lock of the connection", LOCK, ADD, COMMIT, UNLOCK, COMMIT)
equal("an advisory lock of the connection that stays", LOCK, ADD, COMMIT)

# What fails costs what it costs without us

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

# What is rolled back is free for others

DEBIT, ELSEWHERE = do("count up"), do("count up by engine")
LOCKS = (DEBIT, do("lock", "row"), do("lock", "table"))
for lock in LOCKS:
    what = " ".join((lock.kind, *lock.arguments))
    equal(f"{what}, rolled back", lock, ROLLBACK, ELSEWHERE, ADD, COMMIT)
    equal(f"{what}, rolled back in a nested transaction", ADD, undone(lock), ELSEWHERE, COMMIT)
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

# Two sessions

WORK: dict[str, Steps] = {
    "a flush": (ADD, FLUSH),
    "a flush of a change": (do("modify", "old"), FLUSH),
    "core": (do("insert", "a"),),
    "many by core": (do("insert many", "a"),),
    "bulk": (do("save in bulk", "a"),),
    "an update by ORM": (do("update by ORM", "old"),),
    "text": (do("insert as text", "a"),),
    "the connection": (do("insert by connection", "a"),),
    "a row's lock": (do("lock", "row"),),
    "an advisory lock": (do("lock", "advisory"),),
    "a nested transaction that was kept": (do("nested, kept", ADD),),
    "core in a nested transaction that was kept": (do("nested, kept", do("insert", "a")),),
    "an open nested transaction": (do("savepoint"), ADD, FLUSH),
    "a local setting": (do("set", "local tenant"),),
    "a notification": (do("send", "select pg_notify('paid', '1')"),),
}
HELPER = "in a helper's context"
SECONDS: dict[str, Step] = {
    "a helper reads": do(HELPER, READ),
    "a helper writes": do(HELPER, do("add", "c"), COMMIT),
    "a helper does not commit": do(HELPER, do("add", "c"), FLUSH),
    "a helper rolls back": do(HELPER, do("add", "c"), FLUSH, ROLLBACK),
    "a session of its own reads": do("in a session of its own", READ),
    "a session of its own writes": do("in a session of its own", do("add", "c"), COMMIT),
    "a helper in a helper reads": do(HELPER, do(HELPER, READ)),
}
for what, work in WORK.items():
    second = SECONDS["a helper reads"]
    REFUSED[f"{what}, and a helper reads"] = Program(view=(*work, second, READ, LATER, COMMIT))
    if "notification" not in what and "lock" not in what:
        equal(f"{what} and a commit, and a helper reads", *work, COMMIT, second, LATER, COMMIT)
for what, second in SECONDS.items():
    work = WORK["core"]
    REFUSED[f"core, and {what}"] = Program(view=(*work, second, READ, LATER, COMMIT))
    equal(f"a read, and {what}", READ, second, READ, LATER, COMMIT)
    equal(f"core and a commit, and {what}", *work, COMMIT, second, READ, LATER, COMMIT)
READS = SECONDS["a helper reads"]
equal("what was rolled back, and a helper reads", do("insert", "a"), ROLLBACK, READS, ADD, COMMIT)
equal("what was undone, and a helper reads", undone(do("insert", "a")), COMMIT, READS, ADD, COMMIT)
TURN = COMMIT, SECONDS["a helper rolls back"], READS
equal("helpers in turns", ADD, *TURN, LATER, *TURN, LAST, *TURN)
