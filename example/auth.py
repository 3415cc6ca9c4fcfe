"""Authentication: a bearer token (RFC 6750) stands for an account, a password for the operator."""

from __future__ import annotations

import hashlib
import hmac

from flask import Response, abort, current_app, g, request
from sqlalchemy import select
from werkzeug.datastructures import WWWAuthenticate

from example.models import Account, db


def digest(token: str) -> bytes:
    """The stored form of a token. A plain hash is enough for a random token, not for a password."""
    return hashlib.sha256(token.encode()).digest()


def sign_in() -> None:
    """Find the caller's account for ``g.account_id``, which is also the scope of its keys.

    As a ``before_request`` function it runs before every view, and so before every replay.
    """
    credentials = request.authorization
    g.account_id = None
    if credentials is not None and credentials.type == "bearer" and credentials.token:
        known = Account.token_digest == digest(credentials.token)
        g.account_id = db.session.scalar(select(Account.id).where(known))
    if g.account_id is None:
        abort(401, "Send a known token.", www_authenticate=WWWAuthenticate("bearer"))


def operator() -> str | Response:
    """Who operates the shop, for its console: asked for by the browser, by HTTP Basic (RFC 7617).

    A real application asks its own sign-in. Without a password in ``OPERATOR_PASSWORD`` nobody gets in.
    """
    expected = current_app.config["OPERATOR_PASSWORD"]
    given = request.authorization
    password = given.password if given is not None and given.type == "basic" else None
    if expected and password and hmac.compare_digest(password.encode(), expected.encode()):
        return given.username or "operator"
    challenge = WWWAuthenticate("basic", {"realm": "operations", "charset": "UTF-8"})
    return Response("Sign in as an operator.\n", 401, {"WWW-Authenticate": challenge.to_header()})
