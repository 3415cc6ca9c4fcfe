"""Whether everything the guarantees depend on is in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flask_idempotency.core.errors import IdempotencyError, Problem, SealBroken
from flask_idempotency.session.joining import joining_session
from flask_idempotency.session.operation import OpenTransaction, Operation
from flask_idempotency.stores.admin import TRIAL, Admin, Finding, reason, trial_claim
from flask_idempotency.web.routes import AppState
from flask_idempotency.web.signals import Event, store_failed

from .decide import check_sealer
from .find import admin
from .unprotected import examine_routes, write_routes
from .words import explain

FOR_LISTENERS = (
    "commands have the application's context, but no request and an empty flask.g: let listeners on the"
    " engine do without, as with g.get(...). Of the engine's, our own connections are told to those for"
    " connect alone: set there what the tables need, such as a role"
)
"""What to do where a listener of the application keeps us from the tables."""

_NEEDED_LESS = ("index", "memory", "steps")
"""What a claim works without."""


def examine(state: AppState) -> Iterator[Finding]:
    """Check that everything the guarantees depend on is in place: servers and routes."""
    yield from _examine_servers(state)
    yield from examine_routes(state)


def _examine_servers(state: AppState) -> Iterator[Finding]:
    store, ready, told = admin(state), True, dict[str, str]()
    try:
        for finding in store.examine():
            ready = ready and (finding.level != "FAILED" or finding.subject in _NEEDED_LESS)
            told[finding.subject] = finding.level
            yield finding
    except IdempotencyError:
        raise
    except Exception as error:  # a listener's
        ready, bad = False, f"a listener on the engine raised {type(error).__name__}: {reason(error)}"
        yield Finding("FAILED", "listener", bad, FOR_LISTENERS)
    if ready:
        yield from _examine_keys(state, store)
        yield from _examine_claim(state, store)
        yield from _examine_own_connections(state)
    errors: list[BaseException | None] = []

    def note(_sender: object, event: Event) -> None:
        errors.append(event.error)

    with store_failed.connected_to(note, state.app):
        for finding in state.lock.examine():
            told[finding.subject] = finding.level
            yield replace(finding, text=f"{finding.text}: {errors[0]}") if errors else finding
    if "Redis" not in told:  # neither as a lock nor for the records
        yield Finding("ok", "Redis", "not used")


def _examine_keys(state: AppState, store: Admin) -> Iterator[Finding]:
    """Fail if this process lacks the key of a stored response: retries would get 500."""
    try:
        for key in store.outermost():
            if (record := state.records.look(key)) is not None:
                check_sealer(state, record)
                if record.response is not None:
                    state.engine.opened(record)
    except SealBroken as error:
        remedy = (
            "set IDEMPOTENCY_ENCRYPTION_KEYS as the other processes have it, or retries get 500. If a"
            " key is lost for good, deploy without this check until its responses have expired (ttl)"
        )
        yield Finding("FAILED", "encryption", error.detail, remedy)
    except IdempotencyError:  # told elsewhere
        return


def _examine_claim(state: AppState, store: Admin) -> Iterator[Finding]:
    """Claim, and join a session of the application to the claim's transaction, as a view's is."""
    subject = "claim"
    try:
        with store.trial() as hold:
            if hold is None:
                yield Finding("ok", subject, "a record was claimed")
                return
            yield Finding("ok", subject, "a record was claimed and its row locked")
            subject = "db.session"
            yield _examine_session(state, hold)
            subject = "deletion"
    except IdempotencyError as error:
        remedy = store.remedy if isinstance(error, Problem) else ""
        yield Finding("FAILED", subject, explain(error), remedy)


def _examine_session(state: AppState, hold: Any) -> Finding:
    """Join a session to a claim's transaction. Raises ``IdempotencyError`` if it does not join."""
    subject = "db.session"
    try:
        joining_session(state.sessions)
        with OpenTransaction(state, Operation(TRIAL, "", None, "", hold.attempt), hold):
            if state.bind_key == state.sessions.usual:  # sessions find other binds by their models
                state.sessions.current().get_bind(clause=state.table)
    except IdempotencyError:
        raise
    except Exception as error:  # such as that of a get_bind() that asks the request
        text = f"does not join outside of a request: {type(error).__name__}: {reason(error)}"
        return Finding("advice", subject, text, "the first request tries again, and is refused if not")
    return Finding("ok", subject, "joins the operation's transaction")


def _examine_own_connections(state: AppState) -> Iterator[Finding]:
    """Ask on one of our own connections, as the purge after a response and observing do."""
    routes = [each.route for each in write_routes(state) if each.route is not None]
    if not state.settings.has_table or (state.purge is None and all(each.enforce for each in routes)):
        return
    try:
        state.own_records.look(trial_claim().key)
    except Exception as error:  # a listener may raise anything
        bad = f"the purge after responses and observing would fail: {reason(error)}"
        yield Finding("FAILED", "own pool", bad, FOR_LISTENERS)
    else:
        yield Finding("ok", "own pool", "reaches the records")
