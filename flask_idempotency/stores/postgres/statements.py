"""The messages to PostgreSQL, as a reviewer would paste them into psql.

Statements joined by ``;`` travel together and cost one round trip; those that stand alone are in
:mod:`flask_idempotency.stores.sql`. ``{begin}`` and what FACTS has asked for, ``{table}``, ``{role}``
and ``{watch}``, are filled in once for each application.

No wait for a lock exceeds 250 ms: an uncommitted INSERT, the moment between FINISH and its commit, or
an ALTER TABLE may hold it (``INSERT ... ON CONFLICT`` waits for those, and SKIP LOCKED skips rows only,
not tables). Shorter would refuse what a slow disk's commit just delays; longer would pile up workers
behind a migration.
"""

from __future__ import annotations

from flask_idempotency.session.guard import HARMLESS
from flask_idempotency.session.transaction import FIRST
from flask_idempotency.stores.own_pool import BRIEF_SECONDS
from flask_idempotency.stores.sql import NO_LEASE, Dialect, Statements

LOCK_TIMEOUT = "250ms"

# A request may have left a role on its pooled connection: our statements are sent as the one that a
# fresh connection has. Several in one message are one transaction, so SET LOCAL holds for those behind
# it alone.
BRIEFLY = f"""SET LOCAL role = {{role}};
SET LOCAL lock_timeout = '{LOCK_TIMEOUT}';
"""

# In front of what is only observed.
OBSERVING = f"""{BRIEFLY}SET LOCAL statement_timeout = '{BRIEF_SECONDS * 1000:.0f}ms';
SET LOCAL synchronous_commit = off;
"""

SAMPLED_PAGES = 1000
"""How many pages of a table an overview reads: 8 MB, some milliseconds. In thousands of records a state
that one in a hundred has is counted to about a tenth."""

SQL = Statements(
    Dialect(
        now="clock_timestamp()",
        after="clock_timestamp() + {} * interval '1 second'",
        since="extract(epoch FROM clock_timestamp() - {})::float8",
        # Infinite ones have none, and before PostgreSQL 17 an error.
        oldest="""extract(epoch FROM clock_timestamp()
         - min({0}) FILTER (WHERE isfinite({0})))::float8""",
        later="greatest",
        # One array in place of as many columns: psycopg2 decodes the name of each column in Python,
        # which takes longer than all values.
        array="ARRAY[{}]",
        # As text: it may be infinite, before the year 1 or after 9999. BC is written, AD is not.
        text="""coalesce(replace(
         to_char({0} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US BC'), ' AD', ''), {0}::text)""",
        result="step.value->>'result'",
        with_step="""(coalesce(steps::jsonb, jsonb_build_object())
         || jsonb_build_object(%(step)s::text, jsonb_build_object('attempt', %(attempt)s::int,
              'at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US'),
              'result', %(result)s::text)))::json""",
        with_entry="""(coalesce(audit::jsonb, jsonb_build_array())
         || jsonb_build_array(jsonb_build_object('by', %(by)s::text, 'did', %(did)s::text,
              'at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US'),
              'why', %(why)s::text)))::json""",
        # What a leader has committed and not replicated can be read on it once it is demoted, and a
        # client would be told what is lost. NOTIFY is refused there, as our writes are.
        leads="""
   AND CASE WHEN pg_is_in_recovery() THEN pg_notify('idempotency', '') IS NULL ELSE true END""",
        skip=" FOR UPDATE SKIP LOCKED",
        # Twice as long as the server takes to notice a connection that an exit has closed: see FACTS.
        patient="SET LOCAL lock_timeout = '1s';\n",
        # An overview is asked for again and again: it must never become a load.
        bounded="SET LOCAL statement_timeout = '3s';\n",
        percent=f"""least(100, 100.0 * {SAMPLED_PAGES} / greatest(1,
       pg_relation_size($name${{table}}$name$) / current_setting('block_size')::int))""",
        # The same pages each time, so that a number moves only if the table does.
        sample="TABLESAMPLE SYSTEM ((SELECT percent FROM sample)) REPEATABLE (0)",
    )
)

# Changes of our own never conflict with those of other keys, whatever level is the default.
_LEVEL = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;\n"

# In front of changes of our own. With a lease the record is the only proof that an effect may be out in
# the world: every change of it waits for the disk, also on a server that commits asynchronously by
# default. Stronger settings stay.
DURABLY = f"""{_LEVEL}{BRIEFLY}SELECT set_config('synchronous_commit', 'on', true)
 WHERE current_setting('synchronous_commit') = 'off';
"""

# In front of the claim of an atomic operation: its transaction is committed asynchronously. A crash
# that loses it also loses the business transaction, which comes after it in the WAL, and every process
# that could hold the key.
_HASTILY = f"SET LOCAL synchronous_commit = off;\n{BRIEFLY}"
HASTILY = f"{_LEVEL}{_HASTILY}"
CLAIM = f"BEGIN ISOLATION LEVEL READ COMMITTED;\n{_HASTILY}%s;\nCOMMIT;\n"
BEGIN = "BEGIN {begin};\n"

# What a hold must know of the row and its transaction, in the order in which LOCK reads it.
LOCKED = ("owner", "attempt", "xid", "had_written", "isolation")

# The row is locked at the top of the business transaction, at the isolation level the application
# chose.
# - The application's role and lock_timeout are put aside and handed back. What may be waited for is the
#   table's lock, which comes before any row is read; a row's lock is skipped, never waited for.
# - A backend that is busy in a statement notices a dead client only if it looks for it; without that
#   a kill -9 would block the key until the statement ends (see FACTS).
# All of it is local to the transaction, so it works through a pooler such as PgBouncer.
# - The row is locked before what is held is set: an earlier operation of the same transaction may have
#   left its own there.
# - The savepoint of the first unit of work travels behind the lock, so the row is read out of a
#   setting: some drivers show only the last result.
_ASIDE = f"""{{watch}}SELECT set_config('idempotency.role', current_setting('role'), true),
       set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true),
       set_config('idempotency.written', (txid_current_if_assigned() IS NOT NULL)::text, true),
       set_config('role', {{role}}, true), set_config('lock_timeout', '{LOCK_TIMEOUT}', true);
"""
_LOCK = """SELECT set_config('idempotency.held', concat_ws(' ', coalesce((
         SELECT concat_ws(' ', owner, attempt) FROM {table}
          WHERE key = %(key)s AND owner = %(owner)s FOR UPDATE SKIP LOCKED), '- 0'),
       coalesce(txid_current_if_assigned(), 0), current_setting('idempotency.written'),
       current_setting('transaction_isolation')), true),
       set_config('role', current_setting('idempotency.role'), true),
       set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true);
"""
_HELD = f"SAVEPOINT {FIRST};\nSHOW idempotency.held"
LOCK = _ASIDE + _LOCK + _HELD

# A step waits for its row, at most the lock_timeout: others hold it for the moment of an UPDATE only.
_WAIT = "SELECT FROM {table} WHERE key = %(key)s AND owner = %(owner)s FOR UPDATE;\n"
WAIT_AND_LOCK = _ASIDE + _WAIT + _LOCK + _HELD

# The same in a transaction that the session has begun: if the lock fails, that goes on as it was.
_GUARD = "SAVEPOINT idempotency_lock;\n"
INSIDE = {
    lock: f"{_GUARD}{lock.removesuffix(_HELD)}RELEASE idempotency_lock;\n{_HELD}"
    for lock in (LOCK, WAIT_AND_LOCK)
}
LOCK_FAILED = "ROLLBACK TO idempotency_lock;\nRELEASE idempotency_lock"
NOT_LOCKED = f"RELEASE {FIRST}"

# Whether a function of the application's that may write is called by what looks like a read: by a name
# that the server has for one that only reads; as if it were a column (row.function); or by a view, an
# operator, a cast, the check of a domain, or a policy.
_READS_MAY_WRITE = f"""EXISTS (SELECT FROM pg_proc
         WHERE provolatile = 'v' AND pronamespace NOT IN (SELECT oid FROM pg_namespace
                 WHERE nspname IN ('pg_catalog', 'information_schema') OR nspname ~ '^pg_temp')
           AND NOT EXISTS (SELECT FROM pg_depend AS part WHERE part.classid = 'pg_proc'::regclass
                              AND part.objid = pg_proc.oid AND part.deptype = 'e')
           AND (proname = ANY (string_to_array('{HARMLESS}', ' '))
             OR pronargs = 1 AND proargtypes[0] IN (SELECT oid FROM pg_type WHERE typtype = 'c')
             OR EXISTS (SELECT FROM pg_depend AS used
                         WHERE used.refclassid = 'pg_proc'::regclass AND used.refobjid = pg_proc.oid
                           AND used.classid IN ('pg_rewrite'::regclass, 'pg_operator'::regclass,
                 'pg_cast'::regclass, 'pg_constraint'::regclass, 'pg_policy'::regclass))))"""

# Asked once for each engine, on a connection that no request has used, by the names of ``Facts``. A
# server that does not look for dead clients by itself is told to do so in the transactions that hold a
# record, if it can: where it runs on Linux. Half a second is below the second after which a duplicate
# asks whether the owner is alive.
# Two statements, as Pgpool-II meets one alone, first in a pipeline, by a question of its own that it
# leaves open.
FACTS = f"""SET LOCAL lock_timeout = '{LOCK_TIMEOUT}';
SELECT replace(coalesce((SELECT quote_ident(nspname) || '.' || quote_ident(relname)
         FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
         WHERE pg_class.oid = to_regclass(%(table)s)), %(table)s), '%%', '%%%%'),
       quote_literal(current_setting('role')),
       EXISTS (SELECT FROM pg_constraint WHERE condeferrable AND condeferred),
       {_READS_MAY_WRITE},
       CASE WHEN current_setting('client_connection_check_interval', true) = '0'
             AND version() ~ 'linux'
            THEN 'SET LOCAL client_connection_check_interval = 500; ' ELSE '' END"""

# Completing and committing in one message. The view may have set a role that may not see the record, or
# a commit that does not wait for the disk: put right first. If this is still the transaction that
# locked the row, then nobody can have changed it, and the UPDATE changes exactly one row. If either
# is not so, a statement fails (division by zero) and nothing is committed. A row count would not do:
# that of an UPDATE sent together with COMMIT is lost. The read at the end lets PostgreSQL prune the
# row's page: the room of older rows' first versions is used again at once, not after a VACUUM.
FINISH = """SET LOCAL role = {role};
WITH done AS (%s AND pg_catalog.txid_current() = %%(xid)s RETURNING 1)
SELECT 1 / pg_catalog.count(*)::int, pg_catalog.set_config('synchronous_commit',
       coalesce(nullif(pg_catalog.current_setting('synchronous_commit'), 'off'), 'on'), true)
  FROM done;
SELECT FROM {table} WHERE key = %%(key)s"""

# Waits for the holder's row lock, in the server: no polling, and a dead holder counts at once.
# KEY SHARE is the weakest lock that conflicts with FOR UPDATE.
WAIT = """SELECT set_config('lock_timeout', %(milliseconds)s::text, true);
SELECT 1 FROM {table} WHERE key = %(key)s FOR KEY SHARE"""


# A few at a time, each batch in its own transaction, which nothing waits for: it locks only rows that
# nobody holds. A held record is in progress, even if it has expired, and is skipped.
# - In a subquery the clock is read once; as a volatile function it could not use the index, and a
#   purge would read every record that has not expired.
# - ARRAY pins the batch down: a plain IN may be planned so that the subquery runs, and locks, again.
# - By its ctid, its place in the table, a row need not be searched for a second time. Once its lock is
#   ours it stays there. If another transaction changed it after this statement began, the lock is on
#   the new version, which this statement cannot see: it is left to the next purge. A ctid is unique in
#   one table only: hence ONLY, which finds nothing in a partitioned table.
# - Each batch begins where the last one ended, and so does not read the index past all rows that were
#   just deleted: they are in the way until a VACUUM, and as long as any older transaction runs.
# - Without sorts the planner takes the index, which is in this order. It cannot know how many records
#   have expired; if it believes in few, it would read and sort them all for each batch.
# - Before PostgreSQL 18 a sort that is off, and taken all the same, makes the plan so dear that it is
#   compiled (JIT), which takes longer than a batch after a response may.
# - A crash that loses the commit loses nothing: the records have still expired.
# - After a response its worker waits for a batch, and that is sent behind OBSERVING. The lock of a
#   migration is noticed sooner than its time-out: it says nothing about how many a batch may have.
PURGE = f"""{_LEVEL}SET LOCAL synchronous_commit = off;
SET LOCAL lock_timeout = '50ms';
SET LOCAL enable_sort = off;
SET LOCAL jit = off;
WITH gone AS (
  DELETE FROM ONLY {{table}} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM ONLY {{table}}
     WHERE {NO_LEASE} AND expires_at <= (SELECT clock_timestamp())
       AND expires_at >= %(since)s::timestamptz
     ORDER BY expires_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED)) RETURNING expires_at)
SELECT count(*), max(expires_at)::text FROM gone"""
