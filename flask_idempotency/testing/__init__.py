"""What an application's own tests are written with."""

from .age import age
from .assertions import assert_idempotent, assert_idempotent_call
from .crashes import CRASH_POINTS, Crash, crash_at, every_crash

__all__ = [
    "CRASH_POINTS",
    "Crash",
    "age",
    "assert_idempotent",
    "assert_idempotent_call",
    "crash_at",
    "every_crash",
]
