"""The SQL of the Postgres store, as a reviewer would paste it into psql.

Each constant is one message to the server: statements joined by ``;`` travel together and cost one
round trip. ``{table}`` is filled in once for each application; ``%(name)s`` are bound values.

Every time is ``clock_timestamp()``, the database's clock at this moment (``now()`` would be the
transaction's start). Every lock is waited for 250 ms at most: an uncommitted INSERT, the moment
between FINISH and its commit, or an ALTER TABLE may hold it (``INSERT ... ON CONFLICT`` waits for
those, and SKIP LOCKED skips rows only, not tables). Shorter would refuse what a slow disk's commit
just delays; longer would pile up workers behind a migration.
"""

from __future__ import annotations

LOCK_TIMEOUT = "250ms"

COLUMNS = """key, name, state, fingerprint_version, fingerprint, attempt,
       expires_at <= clock_timestamp() AS expired, status, headers::text, body"""

LOOK = f"""SET LOCAL lock_timeout = '{LOCK_TIMEOUT}';
SELECT {COLUMNS}
  FROM {{table}} WHERE key = %(key)s"""

# The claim's transaction. It is committed asynchronously: a crash that loses it also loses the
# business transaction, which follows it in the WAL, and every process that could hold the key.
_OPEN = f"""BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL synchronous_commit = off;
SET LOCAL lock_timeout = '{LOCK_TIMEOUT}';
"""

_INSERT = """INSERT INTO {table}
       (key, name, state, fingerprint_version, fingerprint, attempt, owner, created_at, expires_at)
VALUES (%(key)s, %(name)s, 'in_progress', %(version)s, %(digest)s, 1, %(owner)s,
        clock_timestamp(), clock_timestamp() + %(ttl)s * interval '1 second')
ON CONFLICT (key) DO NOTHING;
"""

# The row is only changed if it can be locked at once: then its holder's transaction has ended.
# An expired record starts afresh.
_TAKE_OVER = """UPDATE {table} SET
       name = %(name)s, state = 'in_progress',
       fingerprint_version = %(version)s, fingerprint = %(digest)s, owner = %(owner)s,
       attempt = CASE WHEN expires_at <= clock_timestamp() THEN 1 ELSE attempt + 1 END,
       created_at = CASE WHEN expires_at <= clock_timestamp()
                         THEN clock_timestamp() ELSE created_at END,
       expires_at = clock_timestamp() + %(ttl)s * interval '1 second',
       completed_at = NULL, status = NULL, headers = NULL, body = NULL
 WHERE key = (SELECT key FROM {table}
               WHERE key = %(key)s AND attempt = %(seen)s
                 AND (state = 'in_progress' OR expires_at <= clock_timestamp())
                 FOR UPDATE SKIP LOCKED);
"""

# The business transaction begins, at the isolation level the application chose, and locks the row.
# - The application's lock_timeout is put aside and handed back once the row is locked.
# - A backend that is busy in a statement notices a dead client only if it looks for it
#   (client_connection_check_interval); without it a kill -9 blocks the key until the statement ends.
# - A server that commits asynchronously by default must not do so with an answer that was given.
# All of it is local to the transaction, so it works through a pooler such as PgBouncer.
_HOLD = f"""COMMIT;
BEGIN {{begin}};
SELECT set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true),
       set_config('lock_timeout', '{LOCK_TIMEOUT}', true),
       set_config('synchronous_commit',
                  CASE current_setting('synchronous_commit')
                  WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true){{watch}};
SELECT attempt, txid_current(),
       set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true)
  FROM (SELECT attempt FROM {{table}} WHERE key = %(key)s AND owner = %(owner)s
           FOR UPDATE SKIP LOCKED) AS held"""

WATCH = """,
       set_config('client_connection_check_interval',
                  CASE current_setting('client_connection_check_interval')
                  WHEN '0' THEN '500ms' ELSE current_setting('client_connection_check_interval') END,
                  true)"""

CLAIM = _OPEN + _INSERT + _HOLD
TAKE_OVER = _OPEN + _TAKE_OVER + _HOLD

# Completing and committing in one message. The row count of an UPDATE sent together with COMMIT is
# lost, so the statement itself fails (division by zero) when it changed no row: another attempt owns
# the record now, or the transaction is not the one that locked it.
# expires_at is left alone unless the view took more than a hundredth of the retention: an unchanged
# index column keeps this a HOT update.
FINISH = """WITH completed AS (
  UPDATE {table} SET state = 'completed', completed_at = clock_timestamp(),
         status = %(status)s, headers = %(headers)s, body = %(body)s,
         expires_at = CASE WHEN clock_timestamp() < expires_at - 0.99 * %(ttl)s * interval '1 second'
                           THEN expires_at
                           ELSE clock_timestamp() + %(ttl)s * interval '1 second' END
   WHERE key = %(key)s AND owner = %(owner)s AND attempt = %(attempt)s
     AND state = 'in_progress' AND txid_current() = %(xid)s
  RETURNING 1)
SELECT 1 / count(*) FROM completed;
COMMIT"""

OWNER = """SELECT owner FROM {table} WHERE key = %(key)s"""

# Waits for the holder's row lock, in the server: no polling, and a dead holder counts at once.
# KEY SHARE is the weakest lock that conflicts with FOR UPDATE.
WAIT = """SET LOCAL lock_timeout = %(milliseconds)s;
SELECT 1 FROM {table} WHERE key = %(key)s FOR KEY SHARE"""

# A few at a time, each batch its own transaction. A record that somebody holds is skipped, also
# when it expired meanwhile: it is in progress.
PURGE = f"""SET LOCAL lock_timeout = '{LOCK_TIMEOUT}';
DELETE FROM {{table}} WHERE key IN (
  SELECT key FROM {{table}} WHERE expires_at <= clock_timestamp()
   ORDER BY expires_at LIMIT %(batch)s FOR UPDATE SKIP LOCKED)"""

STATS = """SELECT name, state, count(*), coalesce(sum(length(body)), 0),
       count(*) FILTER (WHERE expires_at <= clock_timestamp()) AS expired, min(created_at)
  FROM {table} GROUP BY name, state ORDER BY name, state"""

LIST = """SELECT encode(substring(key for 4), 'hex'), name, state, attempt, status,
       length(body), created_at, completed_at, expires_at,
       expires_at <= clock_timestamp() AS expired
  FROM {table}
 WHERE (%(name)s IS NULL OR name = %(name)s) AND (%(state)s IS NULL OR state = %(state)s)
 ORDER BY created_at DESC LIMIT %(limit)s"""
