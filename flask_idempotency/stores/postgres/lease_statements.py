"""The SQL of operations that are not atomic, in the manner of :mod:`.statements`.

Here the record is the only proof that an effect may be out in the world. So every change of it waits
for the disk (``{settings}`` sees to a server that would not), and every change compares the owner's
token: whoever was taken over changes nothing. No transaction is open while the view runs.
"""

from __future__ import annotations

from flask_idempotency.stores.table import HAS_STEPS, RELEASED_KEEPS

from . import statements
from .statements import BRIEFLY, EXPIRED

# Several statements in one message are one transaction, and the row count is that of the last.
_ALONE = f"{{settings}}{BRIEFLY}"
_DURABLY = f"BEGIN ISOLATION LEVEL READ COMMITTED;\n{_ALONE}"

_IS_OURS = """COMMIT;
SELECT attempt FROM {table} WHERE key = %(key)s AND owner = %(owner)s"""

CLAIM = _DURABLY + statements.INSERT + _IS_OURS

# An expired record starts afresh, without the steps of the operation that it was.
_FORGET_STEPS = f"""DELETE FROM {{steps}} WHERE key = %(key)s AND EXISTS (
  SELECT FROM {{table}} WHERE key = %(key)s AND owner = %(seen)s AND {EXPIRED});
"""

TAKE_OVER = _DURABLY + _FORGET_STEPS + statements.TAKE_OVER_ROW + _IS_OURS

_MINE = """WHERE key = %(key)s AND owner = %(owner)s AND state = 'in_progress'"""
# What was released gets no lease again: nobody runs it.
_LEASED = f"{_MINE} AND lease_expires_at IS NOT NULL AND completed_at IS NULL"

_RENEW = f"""UPDATE {{table}} SET lease_expires_at =
       greatest(lease_expires_at, clock_timestamp() + %(lease)s * interval '1 second')
 {_LEASED}"""

EXTEND = _ALONE + _RENEW

# May be sent twice if the connection breaks, so it does not compare the state. A record that was taken
# over, or released by an operator, has another owner. A failure after a finished step waits for a
# decision, with a lease that is over.
FINISH = f"""{_ALONE}UPDATE {{table}} SET
       state = CASE WHEN %(status)s >= 500 THEN 'failed' ELSE 'completed' END,
       completed_at = clock_timestamp(),
       lease_expires_at = CASE WHEN %(waits)s AND {HAS_STEPS} THEN clock_timestamp() END,
       expires_at = clock_timestamp() + %(ttl)s * interval '1 second',
       status = %(status)s, headers = %(headers)s, body = %(body)s
 WHERE key = %(key)s AND owner = %(owner)s"""

END = f"{_ALONE}UPDATE {{table}} SET lease_expires_at = clock_timestamp() {_LEASED}"

# Without a lease, a record in progress belongs to whoever holds its row lock; here nobody does. And it
# expires. But where something has been done, a step or what an operator had to decide about, somebody
# must hear of it if no client comes back: its lease is over, and it waits.
RELEASE = f"""{_ALONE}UPDATE {{table}} SET
       lease_expires_at = CASE WHEN {RELEASED_KEEPS} THEN clock_timestamp() END,
       completed_at = clock_timestamp(),
       expires_at = clock_timestamp() + %(ttl)s * interval '1 second'
 {_MINE}"""

STEPS = """SELECT name, result FROM {steps} WHERE key = %(key)s"""

# May be sent twice; each owner has one result for each step.
_RENEWED = f"""WITH mine AS ({_RENEW}
RETURNING key)"""
_RECORD = """INSERT INTO {steps} (key, name, attempt, created_at, result)
SELECT key, %(step)s, %(attempt)s, clock_timestamp(), %(result)s FROM mine
ON CONFLICT (key, name) DO UPDATE SET result = excluded.result"""
RECORD_STEP = f"{_ALONE}{_RENEWED}\n{_RECORD}"

# A step whose writes commit with it ends the transaction that holds its row.
FINISH_STEP = f"""{statements.STILL_OURS}
{_RENEWED},
done AS ({_RECORD} RETURNING 1)
SELECT 1 / (SELECT count(*) FROM done)::int"""
