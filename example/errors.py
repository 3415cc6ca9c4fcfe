"""Errors: RFC 9457 for programs, like those of Flask-Idempotency, and a page for people."""

from __future__ import annotations

from flask import json, render_template, request
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import HTTPException


class InsufficientFunds(HTTPException):
    """The account does not hold as much.

    402 and not 409, because a retry gets 409 while the first request still runs, and 409 means "try
    again with the same key". The 402 is final and stored: a payment that was declined stays
    declined, even once there is money, until the client decides to pay again with a new key.
    """

    code = 402
    description = "The account does not hold as much."


class SoldOut(HTTPException):
    """There is not as much in stock. 400 for the same reason."""

    code = 400
    description = "There are not as many left."


def as_response(error: HTTPException) -> ResponseReturnValue:
    """The error handler for every error that has a status."""
    kinds = ("application/problem+json", "text/html")  # the first for clients that take anything
    if request.accept_mimetypes.best_match(kinds) == "text/html":
        return render_template("error.html", title=error.name, text=error.description), error.code or 500
    response = error.get_response()
    members = {"title": error.name, "status": error.code, "detail": error.description}
    response.data = json.dumps(members)
    response.content_type = "application/problem+json"
    return response
