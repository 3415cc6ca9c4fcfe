"""The budgets: for each path, the most that each figure may be.

A path is compared with an unprotected view (``BASE``) in an application without the extension.
"Bare" writes a row, commits and reads it; "empty" does nothing.
"""

from __future__ import annotations

CALLS = "function calls, added"
REDIS = "round trips to Redis"
POSTGRES = "round trips to PostgreSQL, added"
TIME = "time, × base"
NO_DISK = "time, × base, without waiting for the disk"
PROCESSOR = "processor time, × base"
SERVER = "PostgreSQL's processor time, × base"
P99 = "99th percentile of time, × that of base"
NETWORK = {0.0005: "time, × base, 0.5 ms a round trip", 0.002: "time, × base, 2 ms a round trip"}
THROUGHPUT = "time under gunicorn with eight clients, × base"
WAITED = "round trips waited for, added"
BYTES = "bytes of table and indexes"
MEMORY = "MiB of memory, added"
IMPORTS = "ms of processor time for imports, added"

BASE = {
    "first, hybrid": "bare",
    "first, postgres": "bare",
    "replay, hybrid": "empty",
    "replay, postgres": "empty",
    "duplicate, hybrid": "empty",
    "unprotected bare view": "bare",
    "unprotected empty view": "empty",
}
"""The duplicate comes while the first request runs; the unprotected views are in a protected
application, the hybrid one."""

RECORD = "record of a 200-byte response"

WORKER = "a worker with Flask, Flask-SQLAlchemy and redis-py"

BUDGETS: dict[str, dict[str, float]] = {
    "first, hybrid": {
        CALLS: 570,
        REDIS: 2,
        POSTGRES: -2,
        WAITED: -1,
        TIME: 1.28,
        SERVER: 2.0,
        P99: 2.0,
        THROUGHPUT: 1.39,
        NETWORK[0.0005]: 1.10,
        NETWORK[0.002]: 0.98,
    },
    "first, postgres": {
        CALLS: 390,
        REDIS: 0,
        POSTGRES: -2,
        WAITED: -2,
        TIME: 1.20,
        SERVER: 2.0,
        NETWORK[0.0005]: 1.06,
        NETWORK[0.002]: 0.94,
    },
    "replay, hybrid": {CALLS: 460, REDIS: 1, POSTGRES: 1, TIME: 3.0, THROUGHPUT: 2.22},
    "replay, postgres": {CALLS: 360, REDIS: 0, POSTGRES: 2, TIME: 2.8},
    "duplicate, hybrid": {CALLS: 390, REDIS: 1, POSTGRES: 0, TIME: 2.2},
    "unprotected bare view": {CALLS: 45, REDIS: 0, POSTGRES: 0, TIME: 1.02},
    "unprotected empty view": {CALLS: 45, REDIS: 0, POSTGRES: 0, TIME: 1.02},
    RECORD: {BYTES: 450},
    WORKER: {MEMORY: 10, IMPORTS: 60},
}
"""With psycopg2."""

_PSYCOPG: dict[str, dict[str, float]] = {
    "first, hybrid": {CALLS: 700, TIME: 1.22, SERVER: 1.4, NETWORK[0.0005]: 1.08, NETWORK[0.002]: 0.97},
    "first, postgres": {
        CALLS: 520,
        TIME: 1.15,
        SERVER: 1.4,
        NETWORK[0.0005]: 1.04,
        NETWORK[0.002]: 0.93,
    },
    "replay, hybrid": {CALLS: 490, TIME: 2.8},
    "replay, postgres": {CALLS: 440, TIME: 2.6},
}
"""Where psycopg's differ: its connections work in Python, and its statements are prepared."""


def budget(path: str, what: str, driver: str) -> float | None:
    """The most that a figure may be with a driver, or None."""
    own = _PSYCOPG.get(path, {}) if driver == "psycopg" else {}
    return own.get(what, BUDGETS[path].get(what))
