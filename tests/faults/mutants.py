"""This package with one thing wrong, each in its own way; and what must catch it.

A mutant is applied to the loaded modules: before the application is made, in the process that gunicorn
forks its workers from, or for a bound of the explorer.
"""

from __future__ import annotations

import inspect
import textwrap
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from flask_idempotency.core import engine
from flask_idempotency.core.engine import DecisionEngine
from flask_idempotency.session.operation import OpenTransaction
from flask_idempotency.stores import lock
from flask_idempotency.stores.holds import Hold, SqlRecords
from flask_idempotency.stores.lock import RedisLock
from flask_idempotency.stores.postgres import statements
from flask_idempotency.stores.postgres.statements import SQL
from flask_idempotency.stores.postgres.store import Messages
from flask_idempotency.web import settings, views
from flask_idempotency.web.attempt import Attempt
from tests.faults.explore.steps import ANSWER_LOST
from tests.faults.explore.world import ALONE, CONNECTION_LOST, CRASH, FAILS, OTHER, THREE, Bound, Plan
from tests.faults.explore.world import FLUSH as FLUSHALL
from tests.faults.nemesis import FLUSH, LOST, REDIS_DOWN, TERMINATED


class Mutant:
    """What is edited, and where it is caught.

    ``soak`` is what a plan has beside no faults and no kills, ``bound`` is for the explorer. None: not
    by that one. An edit: whose text or function, its name, what it says, and what in its place.
    """

    def __init__(
        self, soak: dict[str, Any] | None, bound: Bound | None, *edits: tuple[Any, str, str, str]
    ) -> None:
        self.soak, self.bound, self._edits = soak, bound, edits

    def apply(self) -> ExitStack:
        """Edit the package; at the end of the stack it is as it was."""
        stack = ExitStack()
        for place, name, old, new in self._edits:
            stack.enter_context(patch.object(place, name, _edited(getattr(place, name), old, new)))
        return stack


def _edited(before: Any, old: str, new: str) -> Any:
    is_text = isinstance(before, str)
    text = before if is_text else textwrap.dedent(inspect.getsource(before))
    if text.count(old) != 1:
        raise RuntimeError(f"{before} does not contain {old!r} once any more")
    text, made = text.replace(old, new), dict[str, Any]()
    if is_text:
        return text
    exec(f"from __future__ import annotations\n{text}", before.__globals__, made)  # noqa: S102 -- ours
    return made[before.__name__]


LEFT = Bound(ALONE, before=FAILS)
NOTHING: dict[str, Any] = {}
DUPLICATES = {"faults": (FLUSH,), "slow_share": 0.08, "wait": 0.3}
DEATHS = {"points": ("claim", "view", "write"), "kill_share": 0.2}
ANSWERED = {"points": ("answer",), "kill_share": 0.2}
LOSSES = {"faults": (TERMINATED, LOST), "pause_seconds": 0.1}
ONE = "1 / pg_catalog.count(*)::int"
SKIP = " FOR UPDATE SKIP LOCKED"
MARK = 'self._ask("SET", self._prefix + claim.key.hex(), b"1:done", "PX", lasts)'
MARK_MINE = """self._ask(
        "EVAL", RELEASE.replace("DEL', KEYS[1]", "SET', KEYS[1], '1:done', 'PX', ARGV[2]"), 1,
        self._prefix + claim.key.hex(), _value(claim), lasts)"""
COMPLETE_LATER = """from contextvars import copy_context
        response.call_on_close(lambda run=copy_context().run: run(attempt.complete, response))"""
DELETE = 'self.change("DELETE FROM {table} WHERE key = %(key)s", claim.values())'
SHORTENED = """found = self.sealer.open(record.response, record)
    return replace(found, body=(found.body or b"").strip())"""
DOWN = "from flask_idempotency.core.errors import StoreUnavailable as Down\n    raise Down"
IN_PROGRESS = "(SELECT %(owner)s || ' 1' FROM {table} WHERE key = %(key)s AND state = 'in_progress')"

MUTANTS = {
    # Nobody locks the record's row, nor looks in the end whether it was still there to be changed.
    "no_row_lock": Mutant(
        DUPLICATES,
        Bound(redis=False),
        (Messages, "finish", ONE, "pg_catalog.count(*)"),
        (statements, "LOCK", SKIP, ""),
        (SQL, "take_over", SKIP, ""),
    ),
    # No row from SKIP LOCKED: surely nobody has it.
    "empty_is_free": Mutant(
        DUPLICATES, Bound(redis=False), (statements, "LOCK", "'- 0'", f"{IN_PROGRESS}, '- 0'")
    ),
    # The lock in Redis was free: surely nobody has run it.
    "redis_trusted": Mutant(
        DUPLICATES,
        Bound(faults=(FLUSHALL,)),
        (SQL, "insert", "NOTHING", "UPDATE SET state = 'in_progress', attempt = 1, owner = %(owner)s"),
    ),
    # The client has its answer before the COMMIT.
    "commit_after_answer": Mutant(
        ANSWERED,
        None,
        (Attempt, "_is_settled", "return self._joined.is_settled()", "return False"),
        (views, "after", "attempt.complete(response)", COMPLETE_LATER),
        (
            views,
            "end",
            "open_attempt is not None:",
            "open_attempt and current.open_attempt.phase is not Phase.WAITING:",
        ),
    ),
    # The view's session is not joined: it commits for itself.
    "two_transactions": Mutant(
        ANSWERED, None, (OpenTransaction, "has_joined", "return True", "return False")
    ),
    # The COMMIT failed: surely the record may go.
    "delete_on_error": Mutant(
        {"faults": (LOST,), "pause_seconds": 0.1},
        Bound(ALONE, faults=(ANSWER_LOST,)),
        (
            Messages,
            "end_error",
            "return StoreUnavailable(",
            f"{DELETE}\n        return StoreUnavailable(",
        ),
    ),
    # The connection broke in COMMIT: surely it went well.
    "lost_commit_is_success": Mutant(
        LOSSES,
        Bound(ALONE, faults=(CONNECTION_LOST,)),
        (
            Hold,
            "_finish",
            "raise self._messages.end_error",
            "if not is_lost: raise self._messages.end_error",
        ),
    ),
    # Redis is down: the view runs unprotected.
    "fail_open": Mutant(
        {"faults": (REDIS_DOWN,)},
        None,
        (RedisLock, "acquire", "\n    return Glance.ASK", f"\n    {DOWN}"),
        (views, "claim_or_answer", 'state.settings.on_store_error != "allow"', "False"),
    ),
    # The application does it: it passes ``scope=None``.
    "no_scope": Mutant(NOTHING, None),
    # The claim is part of the business transaction: another BEGIN changes nothing.
    "claim_not_committed": Mutant(
        DEATHS, Bound((FAILS, Plan()), redis=False), (statements, "CLAIM", "COMMIT;\n", "")
    ),
    # A lock in Redis, however old: surely its owner lives.
    "lock_believed_forever": Mutant(
        DEATHS,
        Bound(ALONE, faults=(CRASH,)),
        (lock, "ACQUIRE", ", 'PX', ARGV[2]", ""),
        (RedisLock, "acquire", "0 <= LOCK_SECONDS - left / 1000 < PROBE_AFTER_SECONDS", "True"),
    ),
    # A claim is checked, a replay is not.
    "fingerprint_on_one_path": Mutant(
        {"changed_share": 0.5},
        Bound((Plan(), OTHER)),
        (engine, "decide", "[is_changed]", "[is_changed and record.state is State.IN_PROGRESS]"),
    ),
    # A replay is checked, a take-over is not.
    "fingerprint_not_in_progress": Mutant(
        {**DEATHS, "kill_share": 0.3, "changed_share": 0.8},
        Bound((OTHER,), before=FAILS),
        (engine, "decide", "[is_changed]", "[is_changed and record.state is not State.IN_PROGRESS]"),
    ),
    "never_taken_over": Mutant(
        DEATHS, LEFT, (SqlRecords, "take_over", "return self._hold", "return None and self._hold")
    ),
    # The record stays "in progress".
    "answer_not_stored": Mutant(NOTHING, Bound(ALONE), (Messages, "finish", "state = %(state)s, ", "")),
    # An answer of 500 is an answer, too.
    "errors_kept": Mutant(
        {"trouble_share": 0.3},
        None,
        (settings, "is_stored_by_default", "if status < 500", "if status <= 500"),
    ),
    # A take-over keeps the number of the attempt that died.
    "claim_without_attempt": Mutant(
        DEATHS, LEFT, (SQL, "take_over", "ELSE attempt + 1", "ELSE attempt")
    ),
    # A replay that is not byte for byte.
    "another_answer": Mutant(
        NOTHING,
        Bound(ALONE),
        (DecisionEngine, "opened", "return self.sealer.open(record.response, record)", SHORTENED),
    ),
    # A take-over takes whatever record is there now.
    "no_owner_compared": Mutant(
        None,
        Bound((Plan(fails=True, other=True), Plan()), redis=False, before=FAILS, expired=True),
        (SQL, "take_over", "AND owner = %(seen)s", ""),
    ),
    # FINISH does not ask whether this is still the transaction that locked the row.
    "no_transaction_compared": Mutant(
        None,
        Bound((Plan(escapes=True), Plan()), redis=False),
        (Messages, "finish", "pg_catalog.txid_current() = %(xid)s", "true"),
    ),
    # The marker replaces one's own lock only.
    "no_marker_over_anothers_lock": Mutant(
        None, Bound(faults=(FLUSHALL, CRASH)), (RedisLock, "finish", MARK, MARK_MINE)
    ),
    # The lock goes, and nothing tells that the operation has its answer.
    "no_marker": Mutant(
        None,
        Bound(THREE),
        (RedisLock, "finish", MARK, 'self._ask("DEL", self._prefix + claim.key.hex())'),
    ),
}
