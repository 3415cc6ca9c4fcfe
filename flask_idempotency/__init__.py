"""Flask-Idempotency: write endpoints that are safe to retry."""

from .decorator import idempotent
from .errors import (
    BodyIncomplete,
    BodyMalformed,
    ConfigurationError,
    IdempotencyError,
    KeyMalformed,
    KeyRequired,
    KeyReused,
    NotAtomic,
    OperationInterrupted,
    Problem,
    ReplayForbidden,
    RequestInProgress,
    ResponseNotKept,
    ScopeUnknown,
    StoreUnavailable,
    TransactionConflict,
)
from .extension import Idempotency
from .operation import Operation, current_operation
from .options import RouteOptions
from .signals import (
    Event,
    operation_executed,
    operation_rejected,
    operation_replayed,
    operation_taken_over,
    store_failed,
)

__all__ = [
    "BodyIncomplete",
    "BodyMalformed",
    "ConfigurationError",
    "Event",
    "Idempotency",
    "IdempotencyError",
    "KeyMalformed",
    "KeyRequired",
    "KeyReused",
    "NotAtomic",
    "Operation",
    "OperationInterrupted",
    "Problem",
    "ReplayForbidden",
    "RequestInProgress",
    "ResponseNotKept",
    "RouteOptions",
    "ScopeUnknown",
    "StoreUnavailable",
    "TransactionConflict",
    "current_operation",
    "idempotent",
    "operation_executed",
    "operation_rejected",
    "operation_replayed",
    "operation_taken_over",
    "store_failed",
]
