"""The package with one cure taken away, each in its own way: mutants that programs must tell from it.

A mutant is applied to the loaded modules for as long as a ``with`` lasts, so that the same two
applications serve one after the other. Each names the programs that come out different under it, and
equal or refused without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from inspect import getsource
from typing import Any
from unittest.mock import patch

import wrapt
from psycopg2 import _psycopg, extensions

import servers.urls
from flask_idempotency.drivers import cursors, parsed, psycopg, psycopg2, raw_connection, sqltext
from flask_idempotency.drivers.parsed import Text
from flask_idempotency.session import before_view, leftovers, postgres_units, transaction_scope
from flask_idempotency.session import questions as sql
from flask_idempotency.session import units as units_module
from flask_idempotency.session.postgres_units import Facts, PostgresUnits
from flask_idempotency.session.transaction_scope import Joined
from flask_idempotency.session.units import StandIn, Units
from flask_idempotency.stores.postgres import statements
from flask_idempotency.stores.postgres.messages import Messages
from flask_idempotency.web import protection
from flask_idempotency.web.attempt.attempt import Attempt
from flask_idempotency.web.request.request_state import RequestState
from tests.differential import documented_kept, kept
from tests.differential.comparison import LOST, Twins, Verdict
from tests.differential.documented_schema import DOCUMENTED, WITH_HIDDEN
from tests.differential.programs import Program
from tests.differential.steps import STEPS, Hand, do
from tests.differential.twins import PLAIN_SCHEMA, Schema
from tests.drivers import connect

KEPT = {**kept.KEPT, **documented_kept.KEPT}
HIDDEN = documented_kept.HIDDEN

# What a mutant is


@dataclass(frozen=True)
class Mutant:
    """``why`` it is wrong, how the package becomes it, and which programs show it.

    ``first`` are requests before each of the programs, ``schema`` is what these need beside the usual
    tables; ``driver`` is the only one with which the package can become it. ``anyway`` is a difference
    that the package itself may have.
    """

    why: str
    cut: Callable[[Knife], object]
    programs: dict[str, Program]
    first: tuple[Program, ...]
    schema: Schema
    driver: str
    anyway: str

    def shows(self, verdict: Verdict) -> bool:
        """Whether a program came out different."""
        return not {self.anyway}.issuperset(verdict.differences)


class Knife:
    """Changes loaded modules, and puts everything back in the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Put something else in the place of what a module or class has by this name."""
        self._stack.enter_context(patch.object(owner, name, new))

    def pin(self, kind: type, name: str, value: Callable[[], Any]) -> None:
        """Let an attribute of all objects of a class be this, whatever they set."""
        if name not in getsource(kind):
            raise RuntimeError(f"{kind.__name__} has no {name} any more")

        def keep(each: Any, new: Any) -> None:  # for when it is put back
            vars(each)[name] = new

        pinned = property(lambda _: value(), keep)
        self._stack.enter_context(patch.object(kind, name, pinned, create=True))

    def forget(self, known: dict[Any, Any]) -> None:
        """Empty what a module has remembered."""
        self._stack.enter_context(patch.dict(known, clear=True))

    def rewrite(self, module: Any, old: str, new: str, *names: str) -> None:
        """Change constants that are texts."""
        for name in names:
            before = getattr(module, name)
            if old not in before:
                raise RuntimeError(f"{name} does not contain {old!r} any more")
            self.replace(module, name, before.replace(old, new))


MUTANTS: dict[str, Mutant] = {}


def shown_by(
    *names: str,
    first: tuple[Program, ...] = (),
    schema: Schema = DOCUMENTED,
    driver: str = "",
    anyway: str = "",
    **written: Program,
) -> Callable[[Callable[[Knife], object]], Any]:
    """Register a mutant; ``names`` are those of kept programs, ``written`` are for it alone."""

    def register(cut: Callable[[Knife], object]) -> Any:
        own = {name.replace("_", " "): program for name, program in written.items()}
        known = KEPT | HIDDEN
        if twice := own.keys() & known.keys():
            raise RuntimeError(f"these are names of kept programs: {sorted(twice)}")
        programs = {name: known[name] for name in names} | own
        name = cut.__name__.replace("_", " ")
        MUTANTS[name] = Mutant(cut.__doc__ or "", cut, programs, first, schema, driver, anyway)
        return cut

    return register


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """While this lasts, the package is the mutant."""
    with ExitStack() as stack:
        mutant.cut(Knife(stack))
        yield


def compare(twins: Twins, program: Program, first: tuple[Program, ...] = ()) -> Verdict:
    """As :meth:`Twins.compare`, with the steps that only these programs take."""
    with patch.dict(STEPS, STEPS_HERE):
        for each in first:
            twins.compare(each)
        verdict = twins.compare(program)
    verdict.differences += kept_though_undone(verdict)
    return verdict


def kept_though_undone(verdict: Verdict) -> list[str]:
    """A success must not be kept whose work was dropped above its view."""
    program, protected = verdict.program, verdict.protected
    undone = program.view and program.view[-1].kind == "insert" and program.above == (do("rollback"),)
    if undone and protected.completed and protected.first.status < 400:
        return ["record: a success is kept, and its work was undone above the view"]
    return []


def caught_by(twins: Twins, mutant: Mutant) -> list[str]:
    """The programs that come out different under a mutant: out of its own, and of all that are kept."""
    with applied(mutant):
        others = kept.KEPT if mutant.schema is PLAIN_SCHEMA else KEPT
        programs = {**mutant.programs, **others}
        return [
            name
            for name, each in programs.items()
            if mutant.shows(compare(twins, each, mutant.first if name in mutant.programs else ()))
        ]


# Steps that random programs do not take


def call_the_driver(hand: Hand, name: str, *values: Any) -> None:
    """A method of the driver's connection."""
    getattr(hand.session.connection().connection.driver_connection, name)(*values)


def call_by_a_cursor(hand: Hand, name: str) -> None:
    """A method of the connection that a cursor knows."""
    with hand.session.connection().connection.cursor() as cursor:
        getattr(cursor.connection, name)()


def commit_in_a_teardown(hand: Hand) -> None:
    """When this request ends, after its response is made."""
    functions = hand.run.twin.app.teardown_request_funcs.setdefault(None, [])

    def commit(_error: BaseException | None) -> None:
        if commit in functions:  # once, however often the context is torn down
            functions.remove(commit)
            hand.session.commit()

    functions.append(commit)


STEPS_HERE: dict[str, Callable[..., Any]] = {
    "call the driver": call_the_driver,
    "call by a cursor": call_by_a_cursor,
    "commit in a teardown": commit_in_a_teardown,
}

WITHOUT_RECORD = do(
    "send",
    "do $$ begin delete from public.idempotency_record;"
    " exception when undefined_table then null; end $$",
)
"""The record is out of sight, in the protected application; in the plain one there is none."""

INSERT, COMMIT, ROLLBACK, READ = do("insert", "a"), do("commit"), do("rollback"), do("read")
HELPER_READS = do("in a helper's context", READ)


# The end of the operation


@shown_by(a_record_that_is_not_there=Program(view=(WITHOUT_RECORD, INSERT, COMMIT)))
def finish_without_its_guard(knife: Knife) -> None:
    """Whether the record was changed does not matter to the COMMIT."""
    knife.rewrite(statements, statements.READ_BACK, "SELECT 1;\nCOMMIT", "FINISH", "FINISH_LATE")


@shown_by("another path for good")
def record_out_of_sight(knife: Knife) -> None:
    """The record is looked for on the view's path, by the view's role, and need not be found."""
    end = statements.FINISH.rindex("UPDATE")
    knife.rewrite(statements, statements.FINISH[:end], "", "FINISH")
    knife.rewrite(statements, statements.READ_BACK, "SELECT 1;\nCOMMIT", "FINISH")
    knife.replace(Messages, "_name", lambda self, table, wire: table.name)


@shown_by("another role for good")
def role_left_for_the_finish(knife: Knife) -> None:
    """The record is changed by the role that the view has set."""
    old = (
        "set_config('session_authorization', %(session_user)s, true),\n"
        "       set_config('role', %(role)s, true), "
    )
    knife.rewrite(statements, old, "", "FINISH", "FINISH_LATE")


@shown_by(
    schema=PLAIN_SCHEMA,  # the function is there from then on, and no read is surely one
    a_function_that_hides_one_of_the_server=Program(
        view=(
            do(
                "send",
                "create or replace function elsewhere.txid_current() returns bigint"
                " language plpgsql as $$ begin raise 'not that of the server'; end $$",
            ),
            do("send", "set search_path = elsewhere, pg_catalog, public"),
            COMMIT,
        )
    ),
)
def path_left_for_the_finish(knife: Knife) -> None:
    """Our last statements are read on the view's search path."""
    old = ", set_config('search_path', %(search_path)s, true)"
    knife.rewrite(statements, old, "", "FINISH", "FINISH_LATE")


@shown_by("another role for good")
def role_left_on_the_connection(knife: Knife) -> None:
    """What a request leaves on its connection is who our next statements are sent as."""
    knife.pin(Messages, "_as_login", lambda: False)
    knife.pin(Messages, "_cache", dict)


@shown_by(a_rejection_with_a_write=Program(view=(INSERT,), answer="conflict"))
def leftovers_of_a_rejection_committed(knife: Knife) -> None:
    """What the view left is not undone, and the COMMIT that is for the record commits it, too."""
    knife.replace(transaction_scope, "drop_leftovers", lambda session, name: None)


# Statements held back


@shown_by(
    driver="psycopg2",
    a_NUL_in_a_savepoint=Program(
        view=(INSERT, do("savepoint"), do("fail", "NUL"), do("undo the savepoint"), COMMIT)
    ),
)
def forgotten_before_it_is_bound(knife: Knife) -> None:
    """What was held back is taken before the values are bound, which may fail."""

    def operation_cursor(base: Any) -> Any:
        class Forgetful(before(base)):
            def mogrify(self, query: Any, values: Any = None) -> bytes:
                held = [*self.units.waiting]
                self.units.waiting.clear()
                message = super().mogrify(query, values)
                self.units.waiting[:0] = held
                return message

        return Forgetful

    before: Any = psycopg2._subclass
    knife.replace(psycopg2, "_subclass", operation_cursor)
    knife.replace(psycopg2, "_named", psycopg2._named.__wrapped__)


SYNTAX_ERROR = Program(view=(INSERT, COMMIT, do("fail", "syntax"), ROLLBACK, do("insert", "b"), COMMIT))


def any_message(units: PostgresUnits, _text: Text, _message: bytes) -> bytes:
    """What waits travels in front of it."""
    return psycopg2._joined(units.waiting, units.driver)


OWN_CONFIGURATION = "text search configuration public.own"


@shown_by(
    anyway=LOST,
    a_setting_that_cannot_come_back=Program(
        view=(
            do("send", f"drop {OWN_CONFIGURATION.replace('public', 'if exists public')}"),
            do("send", f"create {OWN_CONFIGURATION} (copy = simple)"),
            do("send", "set default_text_search_config = 'public.own'"),
            COMMIT,
            do("send", "set local default_text_search_config = 'simple'"),
            do("send", f"drop {OWN_CONFIGURATION}"),
            INSERT,
            COMMIT,
            do("insert", "b"),
            ROLLBACK,
            READ,
        )
    ),
)
def one_name_for_all(knife: Knife) -> None:
    """Every savepoint has the same name: that of a unit which was never begun is an earlier one's."""

    def begin(self: PostgresUnits, owner: StandIn) -> None:
        self.begun, number = 0, self.begun
        before(self, owner)
        self.begun = number

    before = PostgresUnits._begin
    knife.replace(PostgresUnits, "_begin", begin)


@shown_by(driver="psycopg2", a_syntax_error_after_a_commit=SYNTAX_ERROR)
def in_front_of_what_was_never_parsed(knife: Knife) -> None:
    """What was held back travels in any message, and every savepoint has the same name."""
    knife.replace(psycopg2, "_prefix", any_message)
    one_name_for_all(knife)


@shown_by(driver="psycopg2", a_syntax_error_after_a_commit_told_by_name=SYNTAX_ERROR)
def in_front_of_what_was_never_parsed_by_name(knife: Knife) -> None:
    """The same with a name for each: nothing is lost, but an operation that could go on is refused."""
    knife.replace(psycopg2, "_prefix", any_message)


def forget_what_was_parsed(knife: Knife) -> None:
    """Begin with no text, and leave none to the package."""
    known: set[Text] = set()
    knife.replace(psycopg2, "parsed", known)
    knife.replace(parsed, "parsed", known)


@shown_by("an empty tuple where there was one value, behind a commit", driver="psycopg2")
def a_text_is_known_with_any_values(knife: Knife) -> None:
    """A text that was parsed is parsed again, whatever is written into it."""
    forget_what_was_parsed(knife)
    knife.replace(psycopg2, "shape_of", lambda values: ())


@shown_by("an empty text inside quotes, behind a commit", driver="psycopg2")
def a_value_inside_quotes_is_a_literal(knife: Knife) -> None:
    """What is written between quotes cannot keep a text from being parsed."""
    forget_what_was_parsed(knife)
    knife.replace(parsed, "_depends_on_values", lambda text: False)


@shown_by("an empty statement, behind what waits", driver="psycopg2")
def a_message_that_ran_nothing_was_parsed(knife: Knife) -> None:
    """Every text that the server has answered may have something in front of it."""
    forget_what_was_parsed(knife)
    knife.replace(psycopg2, "_UNREAD", frozenset())


@shown_by(
    driver="psycopg",
    a_syntax_error_behind_a_commit=SYNTAX_ERROR,
    a_NUL_behind_a_savepoint=Program(
        view=(INSERT, do("savepoint"), do("fail", "NUL"), do("undo the savepoint"), COMMIT)
    ),
)
def in_one_message(knife: Knife) -> None:
    """What was held back and the statement are one message, which is parsed as a whole."""

    def behind(units: PostgresUnits, execute: Any) -> Any:
        query, values = execute.args
        cursor = execute.func.__self__
        text = psycopg.bound(cursor, query, values)
        result = execute.func(";".join([*units.waiting, text]))
        while cursor.nextset():
            pass
        return result

    knife.replace(psycopg, "_behind", behind)
    one_name_for_all(knife)


@shown_by("a write's lock after a rollback", "a row's lock after a rollback")
def rollback_held_back(knife: Knife) -> None:
    """A rollback waits for the next statement, and locks are held until then."""

    def undo(self: PostgresUnits, *, at_once: bool = True) -> None:
        before(self, at_once=False)

    before = PostgresUnits._undo
    knife.replace(PostgresUnits, "_undo", undo)


# What a transaction's end ends


@shown_by("a local setting after a commit")
def settings_outlive_the_commit(knife: Knife) -> None:
    """What was set for a transaction is there in the next one."""
    knife.replace(PostgresUnits, "_remember", lambda self, names: None)


@shown_by("a deferred constraint", "a deferred constraint, by ORM")
def deferred_checks_come_late(knife: Knife) -> None:
    """The view's commit does not check what it should."""
    knife.replace(PostgresUnits, "_check_constraints", lambda self: None)


TWICE_AFTER_A_COMMIT = Program(view=(INSERT, COMMIT, do("take a place", 1), ROLLBACK))


@shown_by(schema=PLAIN_SCHEMA, a_place_taken_twice_after_a_commit=TWICE_AFTER_A_COMMIT)
def constraints_stay_immediate(knife: Knife) -> None:
    """After a commit, deferred constraints are no longer deferred."""
    knife.replace(sql, "CHECK_ALL_DEFERRED", sql.CHECK)


@shown_by(a_place_taken_twice_after_a_commit_where_others_are_immediate=TWICE_AFTER_A_COMMIT)
def constraints_of_both_kinds_stay_immediate(knife: Knife) -> None:
    """The same where some are deferred by definition, and others are not."""
    knife.replace(sql, "CHECK_ALONE", sql.CHECK)


@shown_by(
    a_temporary_table_after_a_commit=Program(
        view=(do("make a temporary table", "dropped"), COMMIT, do("read the temporary table"))
    )
)
def temporary_tables_outlive_the_commit(knife: Knife) -> None:
    """ON COMMIT DROP does nothing at the view's commit."""
    knife.replace(sqltext, "temporary_endings", lambda text: ["DROP TABLE pg_temp.no_such_table"])


@shown_by(
    a_cursor_after_a_commit=Program(
        view=(do("send", "declare numbers cursor for select 1"), COMMIT, do("send", "fetch numbers"))
    )
)
def cursors_outlive_the_commit(knife: Knife) -> None:
    """Cursors on the server are not closed."""
    knife.replace(postgres_units, "CURSOR", 0)


@shown_by("a stream after a commit")
def streams_outlive_the_commit(knife: Knife) -> None:
    """A stream goes on, also in the next transaction."""
    cursors_outlive_the_commit(knife)
    knife.replace(Units, "is_current", lambda self, owner, number: True)


@shown_by("a commit that PostgreSQL makes a rollback")
def failures_forgotten_at_the_commit(knife: Knife) -> None:
    """Nobody asks whether a statement of the transaction has failed."""
    knife.replace(units_module, "FAILED", None)


# Several sessions


@shown_by("a second session commits beside an update", "a helper reads what is not committed")
def writes_give_way(knife: Knife) -> None:
    """What another session has not committed is undone, and nobody says so."""
    knife.replace(PostgresUnits, "_give_way", lambda self: self._undo(at_once=False))


@shown_by(
    a_function_that_writes_beside_a_helper=Program(
        view=(
            do("send", "select lo_create(4711)"),
            HELPER_READS,
            do("send", "select lo_unlink(4711)"),
            COMMIT,
        )
    )
)
def functions_only_read(knife: Knife) -> None:
    """What a text does not tell was surely nothing."""
    knife.replace(PostgresUnits, "_would_lose", lambda self: False)
    knife.replace(PostgresUnits, "_did_more_than_read", lambda self: False)


WRITES_ABOVE = (do("text", "quoted function"), do("commit in a teardown"))


@shown_by(
    "a quoted function, and another session",
    a_function_that_writes_beside_another_session=Program(
        view=(do("text", "function"), do("in a session of its own", READ), COMMIT)
    ),
)
def functions_lose_nothing(knife: Knife) -> None:
    """The server is not asked what another session's turn would undo."""
    knife.replace(PostgresUnits, "_would_lose", lambda self: False)


@shown_by(a_function_that_writes_and_a_late_commit=Program(view=WRITES_ABOVE))
def functions_leave_nothing(knife: Knife) -> None:
    """The server is not asked whether something is left at the end."""
    knife.replace(PostgresUnits, "_did_more_than_read", lambda self: False)


@shown_by("a quoted function")
def quoted_functions_only_read(knife: Knife) -> None:
    """A quoted name stands for a function of the server that only reads."""
    knife.forget(sqltext.TRAITS)
    knife.replace(sqltext, "_QUOTED_NAME", "lower")


@shown_by("a function in a schema")
def qualified_functions_only_read(knife: Knife) -> None:
    """What is called with its schema is not looked at."""
    old, new = r"(?P<qualified>\.\s*)?\b", r"(?P<qualified>(?!))?(?<!\.)\b"
    pattern = sqltext._TRAITS.pattern
    assert old in pattern
    knife.forget(sqltext.TRAITS)
    knife.replace(sqltext, "_TRAITS", sqltext._sql(pattern.replace(old, new)))


@shown_by("an aggregate that writes", "a function in a schema")
def unknown_functions_only_read(knife: Knife) -> None:
    """Every function is one that only reads, unless it is known to do more."""
    knife.forget(sqltext.TRAITS)
    knife.replace(sqltext, "UNSURE", sqltext.READS)


@shown_by(
    *("an operator that writes", "an attribute that writes", "a domain that writes"),
    *("a cast that writes", "a view that writes", "a namesake that writes"),
    schema=WITH_HIDDEN,
)
def reads_only_read(knife: Knife) -> None:
    """What names no function calls none: no view, operator, cast or domain does."""
    knife.pin(Facts, "reads_may_write", lambda: False)


@shown_by(
    a_lock_of_a_function_beside_another_session=Program(
        view=(
            do("text", "function that locks"),
            do("in a session of its own", do("lock", "advisory at once")),
            COMMIT,
        )
    )
)
def functions_lock_nothing(knife: Knife) -> None:
    """What a function has locked may be free again when another session has its turn."""
    knife.replace(sql, "_HAS_LOCKS", "false")


@shown_by(
    a_setting_of_a_function_after_a_commit=Program(
        view=(do("text", "function that sets"), COMMIT, do("text", "show"))
    )
)
def functions_set_nothing(knife: Knife) -> None:
    """What a function has set for the transaction outlives the view's commit."""
    knife.pin(Facts, "set_in_functions", frozenset)


@shown_by("a temporary table that a function makes", "a function makes its temporary table twice")
def functions_make_no_tables(knife: Knife) -> None:
    """What a function has made ON COMMIT DROP outlives the view's commit."""
    knife.pin(Facts, "ended_in_functions", tuple)


@shown_by("a helper's commit in the snapshot")
def one_snapshot_for_two(knife: Knife) -> None:
    """At REPEATABLE READ a session sees what another one commits."""
    knife.replace(PostgresUnits, "_give_way", Units._give_way)


@shown_by(
    a_retry_in_the_view=Program(
        view=(do("count up by engine"), do("count up"), ROLLBACK, do("count up"), COMMIT),
        isolation="REPEATABLE READ",
    )
)
def conflicts_are_the_views_own(knife: Knife) -> None:
    """A view at REPEATABLE READ may catch a conflict, and go on in the same snapshot."""
    knife.replace(postgres_units, "SERIALIZATION_FAILURE", "none")


# Before the view


@shown_by("a setting before the view", "a path before the view")
def settings_before_the_view_lost(knife: Knife) -> None:
    """What was set before the view is not set in it."""

    def adopt(self: PostgresUnits, connection: Any, settings: Any) -> None:
        self.put_under(connection)

    knife.replace(PostgresUnits, "adopt", adopt)


@shown_by(
    a_setting_of_a_function_before_the_view=Program(
        before=(do("text", "function that sets"),), view=(do("text", "show"),)
    )
)
def functions_set_nothing_before_the_view(knife: Knife) -> None:
    """What a function has set before the view is not set in it."""
    knife.replace(sql, "FUNCTIONS", "SELECT NULL::text[]")


@shown_by(
    a_function_before_the_view=Program(
        before=(do("text", "quoted function"),), view=(READ,), after=(COMMIT,)
    )
)
def writes_before_the_view_lost(knife: Knife) -> None:
    """The server is not asked what came before the view has written, or locked for it."""
    knife.rewrite(sql, "txid_current_if_assigned() IS NOT NULL", "false", "EARLIER", "HAS_WRITTEN")
    knife.rewrite(sql, " OR locktype = 'relation' AND mode <> 'AccessShareLock'", "", "EARLIER")


@shown_by("a setting for good before the view")
def settings_before_the_view_end_with_it(knife: Knife) -> None:
    """What was set for the connection does not outlast a commit that comes first."""
    knife.replace(sql.Carried, "lasting", "")


@shown_by("an advisory lock before the view")
def locks_before_the_view_lost(knife: Knife) -> None:
    """What was locked before the view is not locked in it, and nobody says so."""
    found = sql.EARLIER.index("EXISTS (SELECT FROM pg_locks")
    knife.rewrite(sql, sql.EARLIER[found:], "false", "EARLIER")
    knife.replace(before_view, "LOCKS", 0)


@shown_by(
    a_snapshot_that_another_one_follows=Program(
        before=(READ, do("in a helper's context", do("add", "b"), COMMIT)),
        view=(READ,),
        isolation="REPEATABLE READ",
    )
)
def snapshots_before_the_view_lost(knife: Knife) -> None:
    """What was read before the view belongs to another snapshot than what it writes."""
    knife.rewrite(sql, "current_setting('transaction_isolation')", "'read committed'", "EARLIER")


@shown_by(a_write_after_read_only=Program(before=(do("set", "read only"),), view=(INSERT, COMMIT)))
def read_only_before_the_view_lost(knife: Knife) -> None:
    """The view writes in what was chosen to be read only."""
    old = (
        "'on' IN (current_setting('transaction_read_only'), current_setting('transaction_deferrable'))"
    )
    knife.rewrite(sql, old, "false", "EARLIER")
    knife.replace(before_view, "CURSOR", 0)


@shown_by("a write before the view, committed after it")
def refused_and_left_for_a_commit(knife: Knife) -> None:
    """What a refused request's session holds is committed above it."""
    knife.replace(protection, "drop", lambda session: None)


# Above the view


@shown_by("a setting after the view")
def nothing_waits(knife: Knife) -> None:
    """Every view is done with its session when it returns."""
    knife.replace(Joined, "is_settled", lambda self: True)


@shown_by(a_commit_too_late=Program(view=(INSERT, do("commit in a teardown"))))
def leftovers_of_a_success_dropped(knife: Knife) -> None:
    """A success with changes that nobody has committed is kept."""
    knife.replace(Joined, "_refuse_leftovers", lambda self, status: None)


@shown_by(a_rollback_in_a_decorator=Program(view=(INSERT,), above=(ROLLBACK,)))
def undone_and_kept(knife: Knife) -> None:
    """What tells of a work that was undone above the view is kept all the same."""
    knife.replace(Joined, "is_undone", lambda self: False)


@shown_by("a commit after the request of what is not kept")
def undone_and_still_pending(knife: Knife) -> None:
    """What was undone is still in the session, for the next commit."""
    knife.replace(leftovers, "_forget_changes", lambda session: None)


@shown_by("a decorator above a handled error")
def errors_answered_below_the_decorators(knife: Knife) -> None:
    """A decorator above the view sees the answer to its error, not the error."""
    knife.replace(Attempt, "hand_up", lambda self: False)


@shown_by("a decorator above a handled error", "a setting after the view")
def no_envelope(knife: Knife) -> None:
    """Nobody knows whether there are decorators above the view."""
    knife.pin(RequestState, "is_dispatched", lambda: False)


# Doors


@shown_by(a_COMMIT_as_text=Program(view=(INSERT, do("send", "commit"))))
def commit_as_text_sent(knife: Knife) -> None:
    """A statement of the view ends the operation's transaction."""
    knife.replace(sqltext, "ends_transaction", lambda text, *, backslashes=False: False)


@shown_by(
    driver="psycopg2",
    a_large_object=Program(view=(INSERT, do("call the driver", "lobject", 0, "w"), COMMIT)),
)
def doors_of_the_driver_open(knife: Knife) -> None:
    """The driver's own ways past its cursors are there."""
    knife.replace(psycopg2, "REFUSED", frozenset())


@shown_by(
    driver="psycopg2",
    the_driver_rolls_back=Program(view=(INSERT, do("call the driver", "rollback"), COMMIT, READ)),
)
def the_drivers_rollback_is_its_own(knife: Knife) -> None:
    """Whoever reaches for the driver's connection gets the operation's."""
    knife.replace(postgres_units, "DriverDoor", Units.door)


@shown_by(
    driver="psycopg",
    a_cursors_connection_commits=Program(view=(INSERT, do("call by a cursor", "commit"), READ)),
)
def the_drivers_connection_ends_more_than_a_unit(knife: Knife) -> None:
    """The cursors of psycopg know the connection itself, which commits for itself."""
    knife.replace(PostgresUnits, "ends", ())


@shown_by(
    settings_read_at_another_isolation=Program(
        view=(do("ask for serializable"), do("read settings"), COMMIT)
    )
)
def isolation_by_option_ignored(knife: Knife) -> None:
    """The view asks for another isolation, and nobody says that it does not get it."""
    knife.replace(PostgresUnits, "check_mode", lambda self, name, value: None)


# What was asked once

NEW_FUNCTION = (
    "create or replace function be_new_tenant() returns text language sql as"
    " 'select set_config(''app.note'', ''new'', true)'"
)


@shown_by(
    first=(Program(view=(do("send", NEW_FUNCTION), COMMIT)), Program(view=(WITHOUT_RECORD, COMMIT))),
    a_setting_of_a_new_function=Program(
        view=(do("send", "select be_new_tenant()"), COMMIT, do("read settings"))
    ),
)
def facts_are_for_good(knife: Knife) -> None:
    """Nothing is asked again once an operation could not be finished."""
    knife.pin(Facts, "is_stale", lambda: False)


# Connections in the wrapper of an agent


def traced(url: str) -> Any:
    """A connection as agents for tracing hand it out: they see to psycopg2's functions in C as well."""
    extensions.register_type = _register_type
    return wrapt.ObjectProxy(connect(url, servers.urls.driver))


def _register_type(kind: Any, scope: Any = None) -> None:
    _psycopg.register_type(kind, getattr(scope, "__wrapped__", scope))


@shown_by(
    schema=replace(DOCUMENTED, connect=traced),
    driver="psycopg2",  # what is asked of psycopg's connection passes through a wrapper
    a_commit_on_a_wrapped_connection=Program(view=(INSERT, COMMIT, READ)),
    a_setting_before_the_view_on_a_wrapped_connection=KEPT["a setting before the view"],
)
def a_wrapper_is_the_connection(knife: Knife) -> None:
    """Nobody looks for the driver's own connection under it."""
    for each in (raw_connection, cursors, psycopg2):
        knife.replace(each, "innermost", lambda connection: connection)
