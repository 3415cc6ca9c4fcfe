"""When a call is sent again, and how long it waits before: the rules of both HTTP libraries."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from flask_idempotency.core.errors import OperationFailed, RequestInProgress
from flask_idempotency.core.logs import Log

from .allowed import (
    CALLABLE,
    DEADLINE,
    ERRORS,
    GET_KEY,
    HEADER,
    HOOK,
    METHODS,
    RETRIES,
    SECONDS,
    TRANSIENT,
    WHOLE,
    Rule,
    check,
)
from .budget import RETRY, SUCCESS, RetryBudget
from .new_keys import new_key
from .permanent import is_permanent
from .verdicts import is_replay, problem_type, retry_after

log = Log("flask_idempotency.client")

LAST: Final = 1.0
"""Seconds. What a call that waits for its first attempt keeps of its time, to ask once more.

Of a deadline below two seconds, it keeps half.
"""

SHORTEST: Final = 0.001
"""Seconds. A time limit of 0 would be rejected; an attempt that may still begin fails at once."""

PAUSE: Final = 0.1
"""Seconds. The shortest wait for a running attempt, also with a ``backoff`` of 0: it is not counted."""


class HasRequest(Protocol):
    """A response or an error of requests or httpx."""

    @property
    def request(self) -> Any:
        """The request that was sent."""


def attempts_of(outcome: HasRequest) -> int:
    """How many attempts a call made until it had this response or this error.

    A redirect counts its own. A call that our clients do not send again has 1.

    :param outcome: what requests or httpx gave or raised.
    """
    return getattr(outcome.request, _ATTEMPTS, 1)


_ATTEMPTS: Final = "idempotency_attempts"
"""The attribute of a request that counts: there it outlives the pickling of responses and errors."""


def _chance() -> float:
    # Pickled by its name. random.random takes its state along: all copies would draw the same numbers.
    return random.random()  # noqa: S311 -- no secret


@dataclass(frozen=True, kw_only=True)
class Retry:
    """A retry that is about to happen: what ``on_retry`` is given. It holds neither key nor body.

    :param attempt: the number of the attempt that has just failed, from 1.
    :param seconds: until the next one.
    :param method: of the request.
    :param url: where it goes, without user, password, query and fragment.
    :param status: of the response, or None.
    :param error: what was raised in place of a response, or None. Its text may hold the whole URL.
    """

    attempt: int
    seconds: float
    method: str
    url: str
    status: int | None
    error: BaseException | None


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """When a call is sent again. All times are in seconds.

    The wait before the next attempt is random between 0 and ``backoff``, doubled with every attempt up
    to ``backoff_max`` ("full jitter": clients that failed together do not come back together). It is
    never shorter than the server's ``Retry-After``; except after a 409 ``request-in-progress``, where
    that is no use: the first attempt may end at any moment before.

    :param retries: the most retries after failures; 0 switches all retries off, and None allows as many
        as the deadline and the budget do. Waiting for a running attempt (409 ``request-in-progress``)
        is no failure. They are counted anew for a redirect.
    :param deadline: for the whole call, with its redirects. No attempt begins after it, and a wait that
        would end after it is not begun: the call then ends with what it has. The wait after a 409
        ``request-in-progress`` is shortened, so that the call asks once more. A call outlives an outage
        that is shorter than this by more than ``backoff_max`` and the time-out of an attempt.
    :param backoff: the longest wait after the first failure.
    :param backoff_max: the longest wait of its own choice after any failure.
    :param methods: what is sent again: POST and PATCH, which get a key. GET, HEAD, OPTIONS, PUT and
        DELETE get none, as HTTP defines them as safe to repeat. A request to which the caller gave a
        key is sent again whatever its method.
    :param permanent: errors after which a call is not sent again, also where they led to the error that
        is raised. To these come an untrusted certificate, an unknown host, and a proxy's refusal.
    :param budget: what the retries of all calls with this policy cost; None for as many as they want.
        Give one to several policies for a common limit.
    :param on_retry: called with a :class:`Retry` before each wait, in the thread or task of the call.
        What it raises ends the call, and is raised by it.
    :param header: the server's ``IDEMPOTENCY_HEADER``.
    :param sleep: waits; a test gives another.
    :param clock: seconds that only grow; a test gives another.
    :param random: between 0 and 1; a test gives another.
    :raises ValueError: for a value outside of its range.
    :raises TypeError: for a value of another type.
    """

    # A fail-over of 45 s, an attempt that began just before its end (10 s), and a wait (10 s): with 60,
    # one call in fourteen that gets no response would give up.
    retries: int | None = None
    deadline: float = 90
    backoff: float = 1
    backoff_max: float = 10
    methods: Collection[str] = GET_KEY
    permanent: tuple[type[BaseException], ...] = ()
    budget: RetryBudget | None = field(default_factory=RetryBudget, compare=False)
    on_retry: Callable[[Retry], object] | None = None
    header: str = "Idempotency-Key"
    sleep: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.monotonic
    random: Callable[[], float] = _chance

    def __post_init__(self) -> None:
        for name, rule in _ALLOWED.items():
            check(name, getattr(self, name), rule)
        object.__setattr__(self, "methods", frozenset(self.methods))

    def give_key(self, method: str | None, headers: MutableMapping[str, str]) -> bool:
        """Give the request a key if it needs one and has none. Returns whether it may be sent again.

        Raises ``ValueError`` if the caller's own key is empty: no server takes it for one.
        """
        key = headers.get(self.header)
        if isinstance(key, str | bytes) and not key.strip():
            raise ValueError(f"The header {self.header} is empty; allowed: a key, or no such header")
        if method in self.methods and method in GET_KEY:
            headers.setdefault(self.header, new_key())
        return method in self.methods or self.header in headers

    def is_final(self, status: int, headers: Mapping[str, str], body: bytes) -> bool:
        """Return True if the same request would get no better response. ``body`` is decoded.

        A server error, even a 500, is worth another attempt, because an atomic operation that failed
        was rolled back; but not a stored one, which never changes.
        """
        if is_replay(headers):
            return True
        if status == RequestInProgress.status:
            return problem_type(headers, body) != RequestInProgress.type
        if status >= 500:
            return problem_type(headers, body) == OperationFailed.type
        return status not in TRANSIENT


_ALLOWED: Final[Mapping[str, Rule]] = {
    "retries": RETRIES,
    "deadline": DEADLINE,
    "backoff": SECONDS,
    "backoff_max": SECONDS,
    "methods": METHODS,
    "permanent": ERRORS,
    "budget": ((RetryBudget, type(None)), lambda _value: True, "a RetryBudget, or None"),
    "on_retry": HOOK,
    "header": HEADER,
    "sleep": CALLABLE,
    "clock": CALLABLE,
    "random": CALLABLE,
}

POLICY: Final[Rule] = (RetryPolicy,), lambda _value: True, "a RetryPolicy"


def policy_or_usual(policy: RetryPolicy | None) -> RetryPolicy:
    """The policy, or in place of None a new one. Raises ``TypeError`` for anything else."""
    if policy is None:
        return RetryPolicy()
    check("policy", policy, ((RetryPolicy,), lambda _value: True, "a RetryPolicy, or None"))
    return policy


_limits: Final[list[_Limit]] = []


class _Limit:
    """No ``@contextmanager``: that would be a decorator, too, which does nothing for ``async def``."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def __enter__(self) -> None:
        _limits.append(self)

    def __exit__(self, *error: object) -> None:
        _limits.remove(self)


def limit_retries(retries: int = 0) -> AbstractContextManager[None]:
    """For tests: every client sends a call again at most this often, and never waits.

    ``with limit_retries():`` switches retries off. The limit holds in all threads and tasks of the
    process. Retries cost no budget. Asking again for a running attempt counts as a retry.

    :param retries: the most retries of a call; a policy may allow fewer.
    """
    check("retries", retries, WHOLE)
    return _Limit(retries)


class Request(Protocol):
    """A request of either library."""

    method: Any
    url: Any


class Attempts:
    """The attempts to send one request. They end when their policy says so.

    :param request: what is sent; it carries the number of its attempts from then on.
    :param began: when their call did, by the policy's clock; now, if left out.
    """

    def __init__(self, policy: RetryPolicy, request: Request, began: float | None = None) -> None:
        self._policy = policy
        self._request = request
        self.began = policy.clock() if began is None else began
        self._ends = self.began + policy.deadline
        self._made = 0
        self._counted = 0
        self._earned = SUCCESS
        self._handled = sys.exc_info()[1]

    def begin(self) -> float:
        """Begin the next attempt. Returns the seconds that it may take."""
        self._made += 1
        self.count_on(self._request)
        return max(self.left(), SHORTEST)

    def count_on(self, request: Request) -> None:
        """Let a request, or a copy that was sent in its place, say how many attempts there were."""
        setattr(request, _ATTEMPTS, self._made)

    def left(self) -> float:
        """Seconds until the deadline; below 0 after it."""
        return self._ends - self._policy.clock()

    def after_error(self, error: BaseException) -> float | None:
        """Seconds until the next attempt, or None if this error is the last."""
        is_last = is_permanent(error, self._policy.permanent, self._handled)
        return None if is_last else self._next(None, {}, error)

    def after_response(self, status: int, headers: Mapping[str, str], body: bytes) -> float | None:
        """Seconds until the next attempt, or None if this response is the last. ``body`` is decoded."""
        if not self._policy.is_final(status, headers, body):
            return self._next(status, headers, None)
        if self._policy.budget is not None:
            self._policy.budget.give(self._earned)
        return None

    def _next(
        self, status: int | None, headers: Mapping[str, str], error: BaseException | None
    ) -> float | None:
        running = status == RequestInProgress.status  # no other of this status is not final
        seconds = self._wait(running, headers)
        if seconds is None or not self._may_retry(running):
            return None
        if _limits:
            seconds = 0.0
        self._tell(seconds, status, error)
        return seconds

    def _wait(self, running: bool, headers: Mapping[str, str]) -> float | None:
        """Seconds, or None if the deadline does not allow a wait."""
        policy = self._policy
        longest = min(policy.backoff_max, policy.backoff * 2.0 ** min(self._made - 1, 99))
        seconds, left = policy.random() * longest, self.left()
        if running:
            # Retry-After is how long it may take: the rest of a lease, or a guess.
            last = min(LAST, policy.deadline / 2)
            return min(max(seconds, PAUSE), left - last) if left > last else None
        seconds = max(seconds, retry_after(headers))
        return seconds if seconds < left else None

    def _may_retry(self, running: bool) -> bool:
        limits = [limit.retries for limit in _limits[-1:]]
        own = self._policy.retries
        most = min([math.inf if own is None else own, *limits])
        is_free = running and not limits
        self._counted += not is_free
        if not most or self._counted > most:
            return False
        return is_free or bool(limits) or self._pay()

    def _pay(self) -> bool:
        budget = self._policy.budget
        if budget is None:
            return True
        if budget.take(RETRY):
            self._earned = RETRY
            return True
        log.warning("%s %s is not sent again: the retry budget is used up", *self._line())
        return False

    def _line(self) -> tuple[str, str]:
        return self._request.method, _without_secrets(str(self._request.url))

    def _tell(self, seconds: float, status: int | None, error: BaseException | None) -> None:
        method, url = self._line()
        retry = Retry(
            attempt=self._made, seconds=seconds, method=method, url=url, status=status, error=error
        )
        failure = status or type(error).__name__  # an error's text may hold the whole URL
        log.info(
            "%s %s: attempt %d failed with %s; the next one begins in %.2f s",
            *(method, url, self._made, failure, seconds),
            extra={**vars(retry), "error": error and type(error).__name__},
        )
        if self._policy.on_retry is not None:
            self._policy.on_retry(retry)


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
