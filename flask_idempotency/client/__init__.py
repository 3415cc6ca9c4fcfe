"""The caller's half: keys, and sessions that send a call again until they have its response.

Nothing here needs Flask. :class:`IdempotentSession` and :class:`IdempotentAdapter` need requests,
:class:`IdempotentClient`, :class:`IdempotentTransport` and their asynchronous twins need httpx; each is
imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .budget import RetryBudget
from .new_keys import derive_key, new_key
from .retries import Retry, RetryPolicy, attempts_of, limit_retries
from .verdicts import problem_of, was_replayed

if TYPE_CHECKING:
    from .session import IdempotentAdapter, IdempotentSession
    from .transport import (
        AsyncIdempotentClient,
        AsyncIdempotentTransport,
        IdempotentClient,
        IdempotentTransport,
    )

__all__ = [
    "AsyncIdempotentClient",
    "AsyncIdempotentTransport",
    "IdempotentAdapter",
    "IdempotentClient",
    "IdempotentSession",
    "IdempotentTransport",
    "Retry",
    "RetryBudget",
    "RetryPolicy",
    "attempts_of",
    "derive_key",
    "limit_retries",
    "new_key",
    "problem_of",
    "was_replayed",
]

if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "transport" if name.endswith(("Client", "Transport")) else "session"
        return getattr(import_module(f"{__name__}.{module}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
