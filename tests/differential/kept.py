"""Programs that found something once, as small as they could be made, each by what it showed."""

from __future__ import annotations

from tests.differential.programs import Program
from tests.differential.steps import do

_ABORTED = (do("insert", "a"), do("insert", "a"))
"""The second breaks a unique constraint: the transaction is aborted, and the view goes on."""

KEPT: dict[str, Program] = {
    # What cannot be bound, parsed or finished, and what the view does next
    "a NUL in a statement": Program(view=(do("fail", "NUL"),)),
    "a NUL in a flush": Program(view=(do("fail", "NUL in a flush"),)),
    "a surrogate": Program(
        view=(do("fail", "surrogate"), do("rollback"), do("fail", "not null"), do("rollback"))
    ),
    "a surrogate in the text": Program(view=(do("fail", "surrogate in the text"),)),
    "what cannot be adapted": Program(view=(do("fail", "unadaptable"), do("rollback"))),
    "binding fails after a nested rollback": Program(
        view=(do("nested, undone", do("add", "a")), do("fail", "NUL"), do("commit"))
    ),
    "a syntax error": Program(
        view=(do("fail", "syntax"), do("rollback"), do("add", "a"), do("commit"))
    ),
    "a commit that PostgreSQL makes a rollback": Program(view=(*_ABORTED, do("commit"), do("read"))),
    "a nested begin in an aborted transaction": Program(
        view=(*_ABORTED, do("nested, first error ends it", do("add", "c")))
    ),
    "an error inside a nested begin that goes on": Program(
        view=(do("nested, kept", *_ABORTED), do("read"))
    ),
    "releasing an aborted savepoint": Program(
        view=(do("savepoint"), *_ABORTED, do("release the savepoint"), do("read"))
    ),
    "a stream read after its unit was rolled back": Program(
        view=(
            do("open a stream"),
            do("rollback"),
            do("read the stream"),
            do("rollback"),
            do("read"),
        )
    ),
    "a release of a savepoint that is not there": Program(
        view=(do("send", "release savepoint s1"),), after=(do("insert", "z0"),)
    ),
    # What a transaction's end ends
    "a deferred constraint": Program(view=(do("take a place", 1), do("commit"))),
    "a deferred constraint, by ORM": Program(view=(do("take a place by ORM", 1), do("commit"))),
    "a local setting after a commit": Program(
        view=(do("set", "local tenant"), do("commit"), do("add", "a"), do("commit"))
    ),
    "a translated schema after a commit": Program(
        view=(do("translate the schema"), do("commit"), do("read"))
    ),
    "a stream after a commit": Program(view=(do("open a stream"), do("commit"), do("read the stream"))),
    "a write's lock after a rollback": Program(
        view=(do("count up"), do("rollback"), do("count up by engine"))
    ),
    "a row's lock after a rollback": Program(
        view=(do("lock", "row"), do("rollback"), do("count up by engine"))
    ),
    # Settings of the view
    "another path": Program(view=(do("set", "local path"), do("add", "a"), do("commit"))),
    "another path for good": Program(view=(do("set", "path"), do("commit"))),
    "another role": Program(view=(do("set", "local role"), do("add", "a"), do("commit"))),
    "another role for good": Program(view=(do("set", "role"), do("commit"))),
    "serializable by text": Program(view=(do("set", "serializable"),)),
    "serializable by option": Program(view=(do("ask for serializable"),)),
    # Another connection at REPEATABLE READ
    "a setting before a view that does nothing": Program(
        before=(do("set", "local path"),), after=(do("read"),)
    ),
    "another role, and a temporary table emptied by a commit": Program(
        view=(do("make a temporary table", "for a transaction"), do("set", "role"), do("commit"))
    ),
    "read only, and another session": Program(
        view=(
            do("set", "read only"),
            do("in a session of its own", do("set", "local tenant")),
            do("add", "a"),
            do("commit"),
        )
    ),
    "a savepoint by text, and another session": Program(
        view=(
            do("send", "savepoint s1"),
            do("by a second session", do("read")),
            do("send", "rollback to savepoint s1"),
        )
    ),
    "a refusal that the view catches, in a transaction that fails": Program(
        view=(
            do("fail", "unique"),
            do("add", "b"),
            do("in a session of its own", do("lock", "row at once")),
        ),
        catches="everything",
        begins_above=True,
    ),
    "a snapshot from before the view": Program(
        view=(do("count up by engine"), do("count up")), isolation="REPEATABLE READ"
    ),
    # Second sessions
    "a helper reads what is not committed": Program(
        view=(do("insert", "a"), do("in a helper's context", do("read")), do("commit"))
    ),
    "a session of its own reads beside a bulk insert": Program(
        view=(do("save in bulk", "a"), do("in a session of its own", do("read")), do("commit"))
    ),
    "a second session commits beside an update": Program(
        view=(
            do("update by ORM", "old"),
            do("by a second session", do("add", "b"), do("commit")),
            do("commit"),
        )
    ),
    "a lock that a second session must not get": Program(
        view=(do("lock", "row"), do("by a second session", do("lock", "row at once")))
    ),
    "an advisory lock that a helper must not get": Program(
        view=(do("lock", "advisory"), do("in a helper's context", do("lock", "advisory at once")))
    ),
    "a local setting beside a second session": Program(
        view=(
            do("by a second session", do("set", "local tenant")),
            do("read"),
            do("by a second session", do("add", "b"), do("read")),
        )
    ),
    "a helper inside a nested begin": Program(
        view=(do("read"), do("nested, kept", do("in a helper's context", do("load", "old"))))
    ),
    "a helper beside a failed flush": Program(
        view=(
            do("add several", "a"),
            do("add several", "a"),
            do("flush"),
            do("in a helper's context", do("load", "old")),
            do("read"),
        )
    ),
    # Before the view
    "a setting before the view": Program(
        before=(do("set", "local tenant"),), view=(do("add", "a"), do("commit"))
    ),
    "a path before the view": Program(before=(do("set", "local path"),), view=(do("read"),)),
    "a translated schema before the view": Program(
        before=(do("translate the schema"),), view=(do("add", "a"), do("commit"))
    ),
    "a setting for good before the view": Program(before=(do("set", "tenant"),), view=(do("commit"),)),
    "a setting for good in the view, committed above it": Program(
        view=(do("set", "mode"),), after=(do("commit"),)
    ),
    "a setting for good before the view, a commit of nothing, and an error": Program(
        before=(do("set", "mode"),),
        view=(do("commit"), do("lock", "advisory at once")),
        answer="raise",
        handler="plain",
    ),
    "read only before the view": Program(before=(do("set", "read only"),), view=(do("insert", "a"),)),
    "an error before the view": Program(before=(do("fail", "division"),)),
    "a failed flush before a replay": Program(before=(do("add", "b"), do("commit"))),
    "a rollback of what was added before the view": Program(
        before=(do("add", "b"),), view=(do("rollback"), do("read"))
    ),
    "a write before the view, committed after it": Program(
        before=(do("insert", "b"),), after=(do("commit"),)
    ),
    # Above the view
    "a commit in a decorator": Program(view=(do("insert", "a"),), above=(do("commit"),)),
    "a commit after the request": Program(view=(do("read"), do("add", "a")), after=(do("commit"),)),
    "a commit after the request of what is not kept": Program(
        view=(do("add", "a"),), after=(do("commit"),), answer="forbidden"
    ),
    "a commit after the request that fails": Program(
        view=(do("insert", "a"), do("add", "a")), after=(do("commit"),), catches="nothing"
    ),
    "a commit above of what was rolled back by PostgreSQL": Program(
        view=(do("fail", "lock refused"),), above=(do("add", "z"), do("commit"))
    ),
    "a setting after the view": Program(
        view=(do("set", "local tenant"),), after=(do("add", "z"), do("commit"))
    ),
    "a translated schema after the view": Program(
        view=(do("translate the schema"),), above=(do("insert", "z0"), do("commit"))
    ),
    "a translated schema after a view that reads": Program(
        view=(do("translate the schema"), do("read")), after=(do("insert", "z0"), do("commit"))
    ),
    "a read of what the view left": Program(view=(do("insert", "a"),), above=(do("read"),)),
    "a commit around a rejection, which fails": Program(
        view=(do("take a place by ORM", 1),), answer="forbidden", begins_above=True
    ),
    "a commit after a failure, which fails": Program(
        view=(do("insert", "a"), do("add", "a")),
        after=(do("commit"),),
        answer="error",
        catches="nothing",
    ),
    "a commit in a decorator, after one of the view that failed": Program(
        view=(do("add", "c"), do("add", "c"), do("commit")), above=(do("commit"),)
    ),
    "a commit after the view, whose own commit failed": Program(
        view=(do("add", "c"), do("add", "c"), do("commit")), after=(do("add", "z"), do("commit"))
    ),
    "a begin around the view": Program(view=(do("add", "a"),), begins_above=True),
    "a decorator above a handled error": Program(above=(do("read"),), answer="raise", handler="plain"),
}
