"""Errors: RFC 9457 for programs, like those of Flask-Idempotency, and a page for people."""

from flask import json, render_template, request
from flask.typing import ResponseReturnValue
from flask_wtf.csrf import CSRFError
from werkzeug.exceptions import HTTPException

from flask_idempotency import (
    IdempotencyError,
    RequestInProgress,
    Retryable,
    ScopeUnknown,
    StoreUnavailable,
    TransactionConflict,
)


class InsufficientFunds(HTTPException):
    """402 and not 409, which means "try again with the same key": this one is stored, and final."""

    code = 402
    description = "The account does not hold as much."


class CardDeclined(HTTPException):
    code = 402
    description = "The card was declined."


class SoldOut(HTTPException):
    code = 400
    description = "There are not as many left."


# What says nothing about whether the first request worked: the same form, sent again, finds out.
OPEN = (CSRFError, RequestInProgress, Retryable, ScopeUnknown, StoreUnavailable, TransactionConflict)


def as_response(error: HTTPException) -> ResponseReturnValue:
    """The error handler for every error that has a status."""
    kinds = ("application/problem+json", "text/html")  # the first for clients that take anything
    if request.accept_mimetypes.best_match(kinds) == "text/html":
        return _page(error, error.name, error.description, error.code or 500)
    response = error.get_response()
    members = {"title": error.name, "status": error.code, "detail": error.description}
    response.data = json.dumps(members)
    response.content_type = "application/problem+json"
    return response


def as_page(error: IdempotencyError | CSRFError) -> ResponseReturnValue:
    """The error handler of pages for what the extensions would say to programs."""
    if isinstance(error, IdempotencyError):
        text = error.detail if error.status < 500 else "Nothing is known about what became of it."
        return _page(error, error.title, text, error.status)
    text = "If you are signed out, sign in in another tab first."
    return _page(error, "Your session has ended", text, 400)


def _page(error: Exception, title: str, text: str | None, status: int) -> ResponseReturnValue:
    """A page that offers the same form again, with its old key, if it may have worked.

    Only a form that one of our own pages sent, says the browser: another site's gets no button.
    """
    was_form = request.method == "POST" and "idempotency_key" in request.form
    is_ours = request.headers.get("Sec-Fetch-Site") == "same-origin"
    is_open = isinstance(error, OPEN) or status in {401, 500}
    again = was_form and is_ours and is_open
    return render_template("error.html", title=title, text=text, again=again, was_form=was_form), status
