"""Errors as the API shows them: RFC 9457, like those of Flask-Idempotency."""

from __future__ import annotations

from typing import Any

from flask import json
from werkzeug.exceptions import HTTPException


class InsufficientFunds(HTTPException):
    """The account does not hold as much.

    402 and not 409, because a retry gets 409 while the first request still runs, and 409 means "try
    again with the same key". The 402 is final and stored: a payment that was declined stays
    declined, even once there is money, until the client decides to pay again with a new key.
    """

    code = 402
    description = "The account does not hold as much."


def as_problem(error: HTTPException) -> Any:
    """The error handler for every error that has a status."""
    response = error.get_response()
    members = {"title": error.name, "status": error.code, "detail": error.description}
    response.data = json.dumps(members)
    response.content_type = "application/problem+json"
    return response
