"""One operation of an application under test, as a client sends it or a queue delivers it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from flask import Flask
from flask.testing import FlaskClient
from werkzeug.datastructures import Headers

from flask_idempotency.client.keys import new_key
from flask_idempotency.core.records import REPLAYED
from flask_idempotency.web.routes import app_state
from flask_idempotency.web.signals import OUTCOMES, Event

from .comparison import Facts, changed_request, facts_of, shown

__tracebackhide__ = True  # pytest shows the test's line and the message, not what is in between


@dataclass(frozen=True)
class Outcome:
    """What came back once, and what the extension's signals told of it."""

    result: Any
    """The response, or what the function returned."""

    said: str
    """``got 201 {…}``, ``returned …`` or ``raised …``, for a message."""

    facts: Facts
    """What must be the same in each replay."""

    is_right: bool
    """It is what the test expects of the operation."""

    has_failed: bool
    is_replay: bool

    problem: str | None
    """The type of the problem that it tells of."""

    events: Sequence[Event]


Send = Callable[[], Outcome]


class Requests:
    """One operation as a client sends it: a request with its key, unless its headers name another.

    ``changed`` sends other content under the same key, ``other`` an operation that has nothing to do
    with this one, each in an application context of its own, as in production. ``expected`` says what
    the test expects to come back, ``noun`` and ``whose`` what is sent.
    """

    noun = "request"
    whose = "another user's request with the same key"

    def __init__(
        self,
        client: FlaskClient,
        method: str,
        path: str,
        kwargs: Mapping[str, Any],
        changed: Mapping[str, Any] | bool,
        other: Mapping[str, Any] | FlaskClient | None,
        status: int | None,
        ignore_headers: Sequence[str],
    ) -> None:
        self.app, self.name = client.application, f"{method} {path}"
        if "?" in path and "query_string" not in kwargs:  # apart, so that a changed request replaces it
            path, _, query = path.partition("?")
            kwargs = {**kwargs, "query_string": query}
        self._client, self._method, self._path, self._kwargs = client, method, path, kwargs
        self._header = app_state(self.app).settings.header
        self._key = Headers(kwargs.get("headers")).get(self._header) or new_key()
        self._status, self.expected = status, str(status or "a status below 400")
        # Flask adds Vary: Cookie after a view that has used the session; every replay says no-store.
        self._ignored = {"date", "server", "set-cookie", "vary", "cache-control", REPLAYED.lower()}
        self._ignored.update(name.lower() for name in ignore_headers)
        if changed is True:
            token = self.app.config.get("WTF_CSRF_FIELD_NAME", "csrf_token")
            changed = changed_request(kwargs, unchanged=token)
        self.changed = None if changed is False else partial(self.send, **changed)
        theirs = {"client": other} if isinstance(other, FlaskClient) else other
        self.other = None if theirs is None else partial(self.send, **theirs)

    def send(self, client: FlaskClient | None = None, **changed: Any) -> Outcome:
        """Send one, with what is ``changed`` in its arguments."""
        kwargs = copy.deepcopy({**self._kwargs, **changed})  # a file is read once
        kwargs.setdefault("buffered", True)  # a response is closed, as a server does
        headers = kwargs["headers"] = Headers(kwargs.get("headers"))
        headers.setdefault(self._header, self._key)
        # A client in a with block keeps its last request's context, which is of no use in another.
        twin = copy.copy(client or self._client)
        vars(twin).update(preserve_context=False, _context_stack=ExitStack(), _new_contexts=[])
        response, events = _noted(partial(twin.open, self._path, method=self._method, **kwargs))
        status = response.status_code
        has_failed = status >= 400
        return Outcome(
            result=response,
            said=f"got {shown(response)}",
            facts=facts_of(response, self._ignored),
            is_right=not has_failed if self._status is None else status == self._status,
            has_failed=has_failed,
            # Marked as one, or the response is that has redirected to it.
            is_replay=any(REPLAYED in each.headers for each in (response, *response.history)),
            problem=events[-1].problem if events and has_failed else None,
            events=events,
        )


class Calls:
    """One operation as a queue delivers it: a call that consumes a message. See :class:`Requests`."""

    noun = "call"
    whose = "another message"

    def __init__(
        self,
        app: Flask,
        call: Callable[[], Any],
        changed: Callable[[], Any] | None,
        other: Callable[[], Any] | None,
        raises: type[Exception] | None,
    ) -> None:
        self.app, self.name = app, getattr(call, "__name__", "the message")
        self._call, self._raises = call, raises
        self.expected = "a result" if raises is None else raises.__name__
        self.changed = None if changed is None else partial(self.send, changed)
        self.other = None if other is None else partial(self.send, other)

    def send(self, call: Callable[[], Any] | None = None) -> Outcome:
        """Deliver a message once."""

        def deliver() -> tuple[Any, Exception | None]:
            with self.app.app_context():
                try:
                    return (call or self._call)(), None
                except Exception as error:
                    return None, error

        (result, error), events = _noted(deliver)
        return Outcome(
            result=result,
            said=f"returned {result!r}" if error is None else f"raised {error!r}",
            facts={"result": result, "error": type(error).__name__},
            is_right=error is None if self._raises is None else isinstance(error, self._raises),
            has_failed=error is not None,
            is_replay=any(event.outcome == "replayed" for event in events),
            problem=events[-1].problem if events else None,  # an earlier run() of the call may be done
            events=events,
        )


Operation = Requests | Calls


def _noted(function: Callable[[], Any]) -> tuple[Any, Sequence[Event]]:
    """Call a function in a context of its own; note what the signals tell meanwhile."""
    events, context = list[Event](), Context()
    context.run(_events.set, events)
    return context.run(function), events


_events: ContextVar[list[Event] | None] = ContextVar("flask_idempotency_events", default=None)


def note_signals(app: Flask) -> None:
    """Let :func:`_noted` hear of an application's operations, from now on."""
    for signal in OUTCOMES:
        signal.connect(_note, app)


def _note(_app: Flask, event: Event) -> None:
    if (events := _events.get()) is not None:
        events.append(event)
