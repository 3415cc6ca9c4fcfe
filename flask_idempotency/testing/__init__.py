"""What an application's own tests, and a store's, are written with. Needs pytest."""

from .assertions import assert_idempotent
from .calls import assert_idempotent_call
from .check import NotConcurrentWarning
from .crashes import CRASH_POINTS, Crash, crash_at, every_crash
from .external import external_transaction
from .memory import Clock, memory_store

__all__ = [
    "CRASH_POINTS",
    "Clock",
    "Crash",
    "NotConcurrentWarning",
    "assert_idempotent",
    "assert_idempotent_call",
    "crash_at",
    "every_crash",
    "external_transaction",
    "memory_store",
]
