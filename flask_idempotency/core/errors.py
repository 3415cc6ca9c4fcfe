"""What can go wrong, with the facts as attributes.

Two kinds, both below :class:`IdempotencyError`:

* a :class:`Problem` is a response to the client (400, 401, 403, 409, 422, 500 or 503);
* the others are mistakes in the application or its set-up; the client gets a plain 500.

None is a Werkzeug ``HTTPException``: an application's catch-all for those leaves them alone.
No message ever holds a key, a body or a fingerprint.
"""

from __future__ import annotations

from collections.abc import Sized

LONGEST_SHOWN = 40
"""Characters of a wrong value in a message: fewer than an encryption key has in base64."""


class IdempotencyError(Exception):
    """Something Flask-Idempotency refuses to do; ``detail`` says what, and how to mend it.

    A problem has, as class attributes: ``status``, the HTTP status code; ``type``, the last part of the
    problem's type URI; ``title``, its short summary. ``retry_after`` is in whole seconds, or None where
    a retry would not help. A mistake in the application has those of a plain 500.
    """

    status: int = 500
    type: str = "about:blank"
    title: str = "The request could not be served."
    retry_after: int | None = None

    def __init__(self, detail: str | None = None, *, retry_after: int | None = None) -> None:
        # python -OO leaves out the docstrings.
        self.detail: str = detail or (self.__doc__ or self.title).partition("\n")[0]
        self.retry_after = self.retry_after if retry_after is None else retry_after
        super().__init__(self.detail)


class ConfigurationError(IdempotencyError):
    """The extension is set up wrongly."""


def shown(value: object) -> str:
    """A wrong value as a message may show it: only type and length of a URL and of anything long.

    It may be a password or a key in the wrong place, and no good one is short.
    """
    try:
        text = repr(value)
    except ValueError:  # of an integer that is too long
        text = ""
    if text and len(text) <= LONGEST_SHOWN and "://" not in text and not isinstance(value, bytes):
        return text
    size = f" of length {len(value)}" if isinstance(value, Sized) else ""
    return f"a {type(value).__name__}{size} (not shown)"


class NotAtomic(IdempotencyError):
    """The view's writes cannot commit together with the record, so nothing was committed."""


class RecordBroken(IdempotencyError):
    """The stored record cannot be read, as something else wrote to it. Its operation runs no more."""

    type = "record-unreadable"  # in events: the response is a plain 500


class SealBroken(RecordBroken):
    """The stored record cannot be decrypted with the keys in IDEMPOTENCY_ENCRYPTION_KEYS."""


class Problem(IdempotencyError):
    """A response to the client in the form of RFC 9457 (Problem Details)."""

    headers: tuple[tuple[str, str], ...] = ()
    """Those of a response that was not kept which still say where the result is."""


class KeyRequired(Problem):
    """This endpoint requires an idempotency key; send a new one for each operation."""

    status, type, title = 400, "key-required", "An idempotency key is required"


class KeyMalformed(Problem):
    """The idempotency key is not well formed."""

    status, type, title = 400, "key-malformed", "The idempotency key is malformed"


class BodyIncomplete(Problem):
    """The request body ended before it was complete; nothing was done."""

    status, type, title = 400, "body-incomplete", "The request body is incomplete"


class BodyMalformed(Problem):
    """The request body cannot be read in the form this endpoint compares requests by."""

    status, type, title = 400, "body-malformed", "The request body is malformed"


class ScopeUnknown(Problem):
    """Sign in: an idempotency key must belong to a known account."""

    status, type, title = 401, "scope-unknown", "Authentication is required"


class ReplayForbidden(Problem):
    """This caller may no longer receive the stored response."""

    status, type, title = 403, "replay-forbidden", "The stored response may not be replayed"


class RequestInProgress(Problem):
    """A request with this idempotency key is still running; try again later."""

    status, type, title = 409, "request-in-progress", "A request with this key is in progress"
    by_lock = False
    """So says Redis, and nobody has asked the records."""


class LeaseLost(RequestInProgress):
    """Another request took this operation over; this one wrote nothing more."""

    retry_after = 1


class OperationInterrupted(Problem):
    """The operation was interrupted, and its outcome is unknown; an operator must decide.

    A view that is not atomic may raise it if it does not know the outcome of its call. If the route's
    ``on_interrupted`` is "retry" or a callable, the client gets ``Retryable`` in its place; so it does
    from an atomic view, which is rolled back.
    """

    status, type, title = 409, "operation-interrupted", "The operation was interrupted"


class ResponseNotKept(Problem):
    """The operation finished, but its response was too large to store; it will not run again."""

    status, type, title = 409, "response-not-kept", "The response was not kept"


class KeyExpired(Problem):
    """Nothing was done now. It may have been done long ago: find out first, then use a new key."""

    status, type, title = 409, "key-expired", "The idempotency key is too old"


class KeyReused(Problem):
    """This idempotency key was used for another request; find out first what became of that one."""

    status, type, title = 422, "key-reused", "The idempotency key was used for another request"


class OperationFailed(Problem):
    """The operation failed; a retry with the same key will not run it again."""

    status, type, title = 500, "operation-failed", "The operation failed"


class Retryable(Problem):
    """The operation did not succeed this time; try again with the same key.

    Raised by a view, it says that nothing happened: the next retry runs the operation again.
    """

    status, type, title = 503, "try-again", "The operation can be tried again"
    retry_after = 1


class UnknownRecord(IdempotencyError):
    """There is no such record."""


class StepError(IdempotencyError):
    """A step was used in a way that cannot be recorded."""


class StoreUnavailable(Problem):
    """The database is unavailable, or the outcome is unknown; try again with the same key."""

    status, type, title = 503, "store-unavailable", "The idempotency store is unavailable"
    retry_after = 1


class TransactionConflict(Problem):
    """The transaction conflicted with another and was rolled back; try again with the same key."""

    status, type, title = 503, "transaction-conflict", "The transaction conflicted with another"
    retry_after = 1


PROBLEMS = tuple(kind for kind in Problem.__subclasses__() if kind not in (OperationFailed, Retryable))
"""What a client of a protected endpoint may meet whatever its view does, by rising status."""


AUTOCOMMIT = "the engine's connections are in autocommit mode: give them an isolation level"


def sqlstate(error: BaseException | None) -> str | None:
    """The SQLSTATE of an error of any driver for PostgreSQL; None for any other error."""
    code: str | None = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if code is None and error is not None and error.args and isinstance(error.args[0], dict):
        return error.args[0].get("C")  # pg8000's
    return code
