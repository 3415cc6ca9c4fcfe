"""The caller's half: keys, and calls that are sent again with the same key until they have a response.

Nothing here needs Flask. :class:`IdempotentSession` needs requests, :class:`IdempotentTransport` httpx;
each is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .keys import derive_key, new_key

if TYPE_CHECKING:
    from .session import IdempotentSession
    from .transport import IdempotentTransport

__all__ = ["IdempotentSession", "IdempotentTransport", "derive_key", "new_key"]

if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> object:
        modules = {"IdempotentSession": ".session", "IdempotentTransport": ".transport"}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], __name__), name)
