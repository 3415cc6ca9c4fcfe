"""Authentication: a bearer token (RFC 6750) stands for an account."""

from __future__ import annotations

import hashlib

from flask import abort, g, request
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
