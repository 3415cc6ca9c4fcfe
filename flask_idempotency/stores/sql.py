"""The SQL of the records: each statement once, for PostgreSQL and for SQLite.

``{table}`` is filled in once for each application; ``%(name)s`` are bound values. What the two say in
different words is in :class:`Dialect`. Where a statement has to be different in PostgreSQL, or is part
of a longer message there, see :mod:`.postgres.statements`; what only SQLite says is in :mod:`.sqlite`.

Every time is the database's clock at this moment. (In PostgreSQL ``now()`` would be the transaction's
start.)
"""

from __future__ import annotations

from dataclasses import dataclass

from flask_idempotency.core.records import OBSERVED, SEALED_TEXT

from .admin import CAPPED

VERSION = "owner || ' ' || state || ' ' || coalesce(CAST(lease_expires_at AS text), '')"
"""What an operator has seen: any attempt, lease, end or decision makes another one."""

IS_OBSERVED = f"substr(owner, 1, {len(OBSERVED)}) = '{OBSERVED}'"
"""Whether an operation was only observed."""

NO_LEASE = f"(lease_expires_at IS NULL OR {IS_OBSERVED})"
"""Whether a record may be deleted as far as its lease goes. What was only observed may be even if it
was interrupted: it needs nobody's decision."""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What PostgreSQL and SQLite say in different words. ``{}`` stands for a column or a value.

    ``now`` is the present time, ``after`` the one so many seconds later, ``since`` the seconds that
    have passed since a time, ``oldest`` those since the earliest of several, and ``later`` the function
    for the later of two times. ``array`` is one value that holds several, and ``text`` a time as text,
    in UTC. ``result`` is that of a ``step`` of the column ``steps``; ``with_step`` and ``with_entry``
    are the columns ``steps`` and ``audit`` with one more in them. ``leads`` fails where what is read
    may be lost: on a standby. ``skip`` passes by rows that others hold, and ``patient`` waits longer
    for one. For an overview ``bounded`` limits the time; ``percent`` of the table are read, by
    ``sample``.
    """

    now: str
    after: str
    since: str
    oldest: str
    later: str
    array: str
    text: str
    result: str
    with_step: str
    with_entry: str
    leads: str = ""
    skip: str = ""
    patient: str = ""
    bounded: str = ""
    percent: str = "100"
    sample: str = ""


class Statements:
    """The statements of one dialect."""

    def __init__(self, dialect: Dialect) -> None:
        now, skip = dialect.now, dialect.skip
        in_ttl, in_lease = dialect.after.format("%(ttl)s"), dialect.after.format("%(lease)s")

        # An operation that is not atomic does not expire before its end: its effects may be out in the
        # world.
        self.expired = expired = f"(expires_at <= {now} AND lease_expires_at IS NULL)"

        # What a request reads, by the names of ``core.records``; fingerprint and body come on top.
        # Results of steps may be long, and only an attempt asks for them.
        self.fields = {
            "name": "name",
            "state": "state",
            "owner": "owner",
            "headers": "headers",
            "version": "fingerprint_version",
            "attempt": "attempt",
            "expired": f"CASE WHEN {expired} THEN 1 ELSE 0 END",
            "lease_left": f"-{dialect.since.format('lease_expires_at')}",
            "status": "status",
            "released_attempt": "released_attempt",
            "age": dialect.since.format("created_at"),
            "released": f"""CASE WHEN lease_expires_at IS NOT NULL
            THEN {dialect.since.format("completed_at")} END""",
        }

        # As texts: a driver may decode JSON.
        texts = ", ".join(f"CAST({field} AS text)" for field in self.fields.values())
        self.look = f"""SELECT {dialect.array.format(texts)}, fingerprint, body
  FROM {{table}} WHERE key = %(key)s{dialect.leads}"""

        self.insert = f"""INSERT INTO {{table}}
       (key, name, state, fingerprint_version, fingerprint, attempt, owner, created_at, expires_at,
        lease_expires_at)
VALUES (%(key)s, %(name)s, 'in_progress', %(version)s, %(digest)s, 1, %(owner)s, {now}, {in_ttl},
        {in_lease})
ON CONFLICT (key) DO NOTHING"""

        # The row is only changed if it can be locked at once: then its holder's transaction has ended.
        # An expired record starts afresh, or stays as it is. A lease that still runs keeps everybody
        # out.
        self.take_over = f"""UPDATE {{table}} SET
       name = %(name)s, state = 'in_progress',
       fingerprint_version = %(version)s, fingerprint = %(digest)s, owner = %(owner)s,
       attempt = CASE WHEN {expired} THEN 1 ELSE attempt + 1 END,
       released_attempt = CASE WHEN NOT {expired} THEN released_attempt END,
       steps = CASE WHEN NOT {expired} THEN steps END,
       audit = CASE WHEN NOT {expired} THEN audit END,
       created_at = CASE WHEN {expired} THEN {now} ELSE created_at END,
       expires_at = {in_ttl}, lease_expires_at = {in_lease},
       completed_at = NULL, status = NULL, headers = NULL, body = NULL
 WHERE key = (SELECT key FROM {{table}}
               WHERE key = %(key)s AND owner = %(seen)s
                 AND ({expired} OR state = 'in_progress')
                 AND (lease_expires_at IS NULL OR lease_expires_at <= {now}){skip})"""

        mine = "WHERE key = %(key)s AND owner = %(owner)s"
        self.attempt = f"SELECT attempt FROM {{table}} {mine}"

        # May be sent twice if the connection breaks, so it does not compare the state. A record that
        # was taken over, or released by an operator, has another owner. The retention begins again,
        # unless the view was quick: an unchanged index column keeps the UPDATE a HOT one in PostgreSQL,
        # and a hundredth of a day early harms nobody. A failure after a finished step waits for a
        # decision, with a lease that is over.
        self.finish = f"""UPDATE {{table}} SET state = %(state)s, completed_at = {now},
       expires_at = CASE WHEN %(late)s THEN {in_ttl} ELSE expires_at END,
       lease_expires_at = CASE WHEN %(waits)s AND steps IS NOT NULL THEN {now} END,
       status = %(status)s, headers = %(headers)s, body = %(body)s
 {mine}"""

        # Here the record is the only proof that an effect may be out in the world: every change
        # compares the owner's token, so whoever was taken over changes nothing. What was released gets
        # no lease again: nobody runs it.
        running = f"{mine} AND state = 'in_progress'"
        leased = f"{running} AND lease_expires_at IS NOT NULL AND completed_at IS NULL"
        renewed = f"{dialect.later}(lease_expires_at, {in_lease})"
        self.extend = f"UPDATE {{table}} SET lease_expires_at = {renewed} {leased}"
        # An exit in an atomic step leaves the row locked for a moment.
        self.end = f"{dialect.patient}UPDATE {{table}} SET lease_expires_at = {now} {leased}"

        # A step is a value in the record, under its name: sent twice, it is there once.
        self.record_step = f"""UPDATE {{table}} SET lease_expires_at = {renewed},
       steps = {dialect.with_step}
 {leased}"""
        self.steps = "SELECT CAST(steps AS text) FROM {table} WHERE key = %(key)s"

        # Without a lease, a record in progress belongs to whoever holds its row lock; here nobody does.
        # And it expires. But where something has been done, a step or what an operator had to decide
        # about, somebody must hear of it if no client comes back: its lease is over, and it waits.
        self.release = f"""UPDATE {{table}} SET completed_at = {now}, expires_at = {in_ttl},
       lease_expires_at =
         CASE WHEN released_attempt IS NOT NULL OR steps IS NOT NULL THEN {now} END
 {running}"""

        # From here on: what operators ask for. In SQLite a column may hold anything, hence the casts.

        # Who runs an operation has a lease, or has nothing written of an end (completed_at is null).
        state = f"""CASE WHEN {IS_OBSERVED} THEN 'observed' WHEN state <> 'in_progress' THEN state
       WHEN lease_expires_at <= {now} THEN 'interrupted'
       WHEN lease_expires_at IS NULL AND completed_at IS NOT NULL THEN 'released'
       ELSE state END"""
        group = f"CAST(name AS text) AS name, CAST({state} AS text) AS state"
        # Each key ends with its scope; an empty tail fits them all.
        of_scope = "substr(key, length(key) + 1 - CAST(%(size)s AS integer)) = %(tail)s"
        named = "(CAST(%(name)s AS text) IS NULL OR name = %(name)s)"

        # Sorted inside, so that texts are made of a few records only. The last condition says nothing
        # new, but it shows the planner that interrupted ones are in the partial index.
        self.lines = f"""SELECT key, {group}, CAST(attempt AS integer), CAST(status AS integer),
       length(body), {dialect.text.format("created_at")},
       CASE WHEN state <> 'in_progress' THEN {dialect.text.format("completed_at")} END,
       CASE WHEN lease_expires_at IS NULL THEN {dialect.text.format("expires_at")} END, {expired},
       {VERSION}
  FROM (SELECT * FROM {{table}}
 WHERE key BETWEEN %(low)s AND %(high)s AND {of_scope} AND {named}
   AND (CAST(%(state)s AS text) IS NULL OR {state} = %(state)s)
   AND (coalesce(%(state)s, '') <> 'interrupted' OR lease_expires_at <= (SELECT {now}))
 ORDER BY created_at DESC LIMIT %(limit)s) AS newest ORDER BY created_at DESC"""
        self.notes = """SELECT CAST(steps AS text), CAST(audit AS text)
  FROM {table} WHERE key = %(key)s"""

        # For an overview. Those with a lease are few, and those that matter: counted, never estimated.
        self.leased = f"""{dialect.bounded}SELECT name, state, count(*),
       {dialect.oldest.format("created_at")}
  FROM (SELECT {group}, created_at FROM {{table}} WHERE lease_expires_at IS NOT NULL
         ORDER BY lease_expires_at LIMIT {CAPPED}) AS few GROUP BY 1, 2"""
        self.others = f"""{dialect.bounded}WITH sample AS (SELECT {dialect.percent} AS percent)
SELECT {group}, count(*), (SELECT percent FROM sample)
  FROM {{table}} {dialect.sample} WHERE lease_expires_at IS NULL GROUP BY 1, 2"""
        self.overdue = f"""{dialect.bounded}SELECT count(*), {dialect.oldest.format("expires_at")}
  FROM (SELECT expires_at FROM {{table}}
         WHERE expires_at <= (SELECT {now}) AND lease_expires_at IS NULL
         ORDER BY expires_at LIMIT {CAPPED}) AS few"""

        # How many responses and steps that a retry may need are encrypted under which key: the first
        # bytes name it, and nine of them are twelve characters of base64.
        self.sealed = f"""SELECT CASE WHEN headers IS NULL THEN substr(body, 1, 9) END, NULL, count(*)
  FROM {{table}} WHERE status IS NOT NULL AND NOT {expired} GROUP BY 1
 UNION ALL SELECT NULL, substr({dialect.result}, 1, {len(SEALED_TEXT) + 12}), count(*)
  FROM {{table}}, json_each(steps) AS step WHERE NOT {expired} GROUP BY 2"""

        # What an operator decides waits for the disk. Another owner: whoever held the record before
        # writes nothing more. The retention begins again, and so does the count of attempts. What is
        # released waits with a lease that is over: the decision is not the end, and if no client comes
        # back, somebody must hear of it.
        self.note = f"""UPDATE {{table}} SET audit = {dialect.with_entry}
 WHERE key = (SELECT key FROM {{table}} WHERE key = %(key)s{skip})"""
        self.settle = f"""UPDATE {{table}} SET state = %(state)s, owner = %(owner)s,
       lease_expires_at = CASE WHEN %(state)s = 'in_progress' THEN {now} END,
       created_at = CASE WHEN %(anew)s THEN {now} ELSE created_at END,
       completed_at = {now}, expires_at = {dialect.later}(expires_at, {in_ttl}),
       status = %(status)s, headers = %(headers)s, body = %(body)s,
       released_attempt = CASE WHEN %(state)s = 'in_progress' THEN attempt END,
       audit = {dialect.with_entry}
 WHERE key = (SELECT key FROM {{table}}
   WHERE key = %(key)s AND {VERSION} = %(seen)s AND {state} IN ('interrupted', 'failed'){skip})"""

        self.erase = f"""DELETE FROM {{table}} WHERE key = (SELECT key FROM {{table}}
   WHERE key = %(key)s AND {VERSION} = %(seen)s AND {NO_LEASE}{skip})"""

        # PostgreSQL has its own.
        self.purge = f"""DELETE FROM {{table}} WHERE key IN (SELECT key FROM {{table}}
  WHERE {NO_LEASE} AND expires_at <= {now}
  ORDER BY expires_at LIMIT %(batch)s)"""
