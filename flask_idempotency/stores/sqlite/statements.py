"""The SQL of SQLite: PostgreSQL's statements in its dialect."""

from __future__ import annotations

from flask_idempotency.stores.table import HAS_STEPS, NO_LEASE, RELEASED_KEEPS, VERSION

NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"
IN_TTL = "strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :ttl))"
BEFORE = "strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', -:older))"
_LEASE = "strftime('%Y-%m-%d %H:%M:%f', 'now', printf('%+.3f seconds', :lease))"
_LEASE = f"CASE WHEN :lease IS NOT NULL THEN {_LEASE} END"
_EXPIRED = f"(expires_at <= {NOW} AND lease_expires_at IS NULL)"
_MINE = "WHERE key = :key AND owner = :owner AND state = 'in_progress'"
_LEASED = f"{_MINE} AND lease_expires_at IS NOT NULL AND completed_at IS NULL"

# What LOOK reads, by the names of ``core.rows``.
FIELDS = (
    "name", "state", "version", "digest", "attempt", "owner", "expired", "lease_left", "status",
    "headers", "body", "released_attempt", "age", "released",
)  # fmt: skip
LOOK = f"""SELECT key, name, state, fingerprint_version, fingerprint, attempt, owner, {_EXPIRED},
       (julianday(lease_expires_at) - julianday('now')) * 86400.0, status, headers, body,
       released_attempt, (julianday('now') - julianday(created_at)) * 86400.0,
       CASE WHEN lease_expires_at IS NOT NULL
            THEN (julianday('now') - julianday(completed_at)) * 86400.0 END
  FROM {{table}} WHERE key = :key"""

INSERT = f"""INSERT OR IGNORE INTO {{table}}
       (key, name, state, fingerprint_version, fingerprint, attempt, owner, created_at, expires_at,
        lease_expires_at)
VALUES (:key, :name, 'in_progress', :version, :digest, 1, :owner, {NOW}, {IN_TTL},
        {_LEASE})"""

_SEEN = f"""WHERE key = :key AND owner = :seen
   AND ({_EXPIRED} OR state = 'in_progress')
   AND (lease_expires_at IS NULL OR lease_expires_at <= {NOW})"""

FORGET_STEPS = f"""DELETE FROM {{steps}} WHERE key = :key AND EXISTS (
  SELECT 1 FROM {{table}} WHERE key = :key AND owner = :seen AND {_EXPIRED})"""

TAKE_OVER = f"""UPDATE {{table}} SET
       name = :name, state = 'in_progress', fingerprint_version = :version, fingerprint = :digest,
       owner = :owner, attempt = CASE WHEN {_EXPIRED} THEN 1 ELSE attempt + 1 END,
       released_attempt = CASE WHEN NOT {_EXPIRED} THEN released_attempt END,
       created_at = CASE WHEN {_EXPIRED} THEN {NOW} ELSE created_at END,
       expires_at = {IN_TTL}, lease_expires_at = {_LEASE},
       completed_at = NULL, status = NULL, headers = NULL, body = NULL
 {_SEEN}"""

ATTEMPT = f"SELECT attempt FROM {{table}} {_MINE}"

FINISH = f"""UPDATE {{table}} SET
       state = CASE WHEN :status >= 500 AND lease_expires_at IS NOT NULL
                    THEN 'failed' ELSE 'completed' END,
       completed_at = {NOW}, expires_at = {IN_TTL},
       lease_expires_at = CASE WHEN :waits AND {HAS_STEPS} THEN {NOW} END,
       status = :status, headers = :headers, body = :body
 WHERE key = :key AND owner = :owner"""

EXTEND = f"UPDATE {{table}} SET lease_expires_at = max(lease_expires_at, {_LEASE}) {_LEASED}"
END = f"UPDATE {{table}} SET lease_expires_at = {NOW} {_LEASED}"
RELEASE = f"""UPDATE {{table}} SET
       lease_expires_at = CASE WHEN {RELEASED_KEEPS} THEN {NOW} END,
       completed_at = {NOW}, expires_at = {IN_TTL} {_MINE}"""

STEPS = "SELECT name, result FROM {steps} WHERE key = :key"
RECORD_STEP = f"""INSERT OR REPLACE INTO {{steps}} (key, name, attempt, created_at, result)
VALUES (:key, :step, :attempt, {NOW}, :result)"""

_OLDER = """state <> 'in_progress' AND lease_expires_at IS NULL
   AND completed_at <= :before"""
_EXPIRED_KEYS = f"""SELECT key FROM {{table}} WHERE {_EXPIRED} OR ({_OLDER})
 ORDER BY expires_at LIMIT :batch"""
PURGE_STEPS = f"DELETE FROM {{steps}} WHERE key IN ({_EXPIRED_KEYS})"
_ERASED = f"WHERE key = :key AND {NO_LEASE} AND (:seen IS NULL OR {VERSION} = :seen)"
ERASE_STEPS = f"DELETE FROM {{steps}} WHERE key = :key AND EXISTS (SELECT 1 FROM {{table}} {_ERASED})"
ERASE = f"DELETE FROM {{table}} {_ERASED}"
PURGE = f"DELETE FROM {{table}} WHERE key IN ({_EXPIRED_KEYS})"
