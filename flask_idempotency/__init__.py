"""Flask-Idempotency: write endpoints that are safe to retry.

Each name is imported when it is first used. So ``flask_idempotency.client`` works where Flask is not
installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flask_idempotency.core.errors import *
    from flask_idempotency.session.after_commit import after_commit
    from flask_idempotency.web.request import current_operation
    from flask_idempotency.web.signals import *
    from flask_idempotency.web.views import idempotent

    from .extension import Idempotency

__all__ = [
    "BodyIncomplete",
    "BodyMalformed",
    "ConfigurationError",
    "Idempotency",
    "IdempotencyError",
    "KeyExpired",
    "KeyMalformed",
    "KeyRequired",
    "KeyReused",
    "NotAtomic",
    "OperationFailed",
    "OperationInterrupted",
    "ReplayForbidden",
    "RequestInProgress",
    "ResponseNotKept",
    "Retryable",
    "ScopeUnknown",
    "StoreUnavailable",
    "TransactionConflict",
    "after_commit",
    "current_operation",
    "idempotent",
    "operation_executed",
    "operation_interrupted",
    "operation_observed",
    "operation_rejected",
    "operation_replayed",
    "operation_taken_over",
    "operation_unprotected",
    "store_failed",
]

__version__: str

_MODULES = "core.errors", "web.views", "extension", "session.after_commit", "web.request", "web.signals"

if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name == "__version__":
            return import_module("importlib.metadata").version("flask-idempotency")
        for module in _MODULES if name in __all__ else ():
            found = import_module(f"{__name__}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
