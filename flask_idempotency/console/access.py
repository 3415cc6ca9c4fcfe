"""Who may see the pages, and that a form was sent from one of them.

A form has a token, signed with the application's ``SECRET_KEY`` over a random value in a cookie of its
own and over who is acting. So it needs no session of the application's, works beside any way to sign
in, and is worth nothing to anybody else. Another site can neither read the token nor have the cookie
sent with a form (``SameSite=Lax``). It is sent with a link, though, so that a page opened by one leaves
the forms of others alone.

What has been done is said once, on the next page, by another such cookie: an address could say
anything.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from flask import Flask, current_app, g, request, url_for
from itsdangerous import BadData, URLSafeTimedSerializer
from werkzeug.wrappers import Response

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError
from flask_idempotency.operate.words import LONGEST_NAME, one_line
from flask_idempotency.web.forms import signing_keys

COOKIE = "idempotency_console"
TOKEN = "token"  # noqa: S105 -- the name of a field
TOKEN_SECONDS = 12 * 3600
"""How long a page may lie open before its forms are refused: a shift."""

SAID = "idempotency_console_said"
SAID_SECONDS = 60
"""How long the next page may take to come."""

SOMEBODY = "console"
"""Who acts, as recorded, where ``authorize`` does not say it."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class FormRefused(IdempotencyError):
    """The form was not sent from a page of this console, or its page is too old. Load it again."""


def admit(authorize: Callable[[], object]) -> Response | None:
    """Let the request in, or return the response that refuses it.

    What ``authorize`` returns decides: a response is sent as it is, False, None and a blank text
    refuse, True lets in, and so does any other text, which says who acts. Raises :class:`FormRefused`
    for a form without the right token, and ``ConfigurationError`` for any other result and without a
    ``SECRET_KEY``.
    """
    found = current_app.ensure_sync(authorize)()
    match found:
        case Response():
            g.idempotency_is_theirs = True
            return found
        case True | False | None:
            name = SOMEBODY if found else ""
        case str():
            name = one_line(found)
        case _:  # ("no", 401) would be true
            raise ConfigurationError(
                f"authorize returned a {type(found).__name__}; allowed: True, or a text that says who"
                " acts, to let in; False or None to refuse; a response object to send that"
            )
    if not name:
        return Response("You may not operate this application.\n", 403, mimetype="text/plain")
    if len(name) > LONGEST_NAME:
        raise ConfigurationError(
            f"authorize returned a name of {len(name):,} characters; at most {LONGEST_NAME} are noted"
        )
    serializer = _serializer(current_app)  # first of all: without a key, no page promises a form
    g.idempotency_who = name
    g.idempotency_cookie = request.cookies.get(_named(COOKIE)) or secrets.token_urlsafe(16)
    if request.method == "POST":
        _check(serializer)
    return None


def is_admitted() -> bool:
    """Return True if :func:`admit` has let the present request in."""
    return "idempotency_cookie" in g


def who() -> str:
    """Who acts in the present request."""
    name: str = g.idempotency_who
    return name


def token() -> str:
    """Return the value of a form's field."""
    return _signed()


def say(response: Response, what: str, digits: str = "") -> Response:
    """Let the next page of a record, or the list, say once what has been done."""
    _set_cookie(response, SAID, _signed(what, digits), SAID_SECONDS)
    return response


def said(digits: str = "") -> str:
    """Return the page's message, if there is one."""
    try:
        value = request.cookies.get(_named(SAID), "")
        *bound, what, about = _serializer(current_app).loads(value, max_age=SAID_SECONDS)
    except (BadData, ValueError):
        return ""
    if bound != _bound() or about != digits:
        return ""
    g.idempotency_is_said = True
    return str(what)


def secure(response: Response) -> Response:
    """Keep other sites, caches and frames away from a response, unless it is the application's."""
    if "idempotency_is_theirs" in g:
        return response
    response.headers.update(_HEADERS)
    # A form without the cookie is refused. From another site it comes so, and a new cookie would make
    # the forms worthless that the operator has open.
    if is_admitted() and _named(COOKIE) not in request.cookies and request.method != "POST":
        _set_cookie(response, COOKIE, g.idempotency_cookie)
    if "idempotency_is_said" in g:
        _set_cookie(response, SAID, "", 0)
    return response


def _set_cookie(response: Response, name: str, value: str, seconds: int | None = None) -> None:
    response.set_cookie(
        _named(name),
        value,
        max_age=seconds,
        path=url_for(f"{request.blueprint}.overview"),
        secure=request.is_secure,
        httponly=True,
        samesite="Lax",
    )


def _named(name: str) -> str:
    """The cookie's name in the browser, which takes this prefix with ``Secure`` only.

    So a page without TLS cannot plant it (draft-ietf-httpbis-rfc6265bis, section 4.1.3.1).
    """
    return f"__Secure-{name}" if request.is_secure else name


def _check(serializer: URLSafeTimedSerializer) -> None:
    try:
        bound = serializer.loads(request.form.get(TOKEN, ""), max_age=TOKEN_SECONDS)
    except BadData:
        bound = None
    if bound != _bound():
        raise FormRefused


def _signed(*values: str) -> str:
    return str(_serializer(current_app).dumps([*_bound(), *values]))


def _bound() -> list[str]:
    return [g.idempotency_cookie, who()]


def _serializer(app: Flask) -> URLSafeTimedSerializer:
    keys = signing_keys(app, "the console signs its forms")
    how: dict[str, Any] = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
    return URLSafeTimedSerializer(keys, salt=b"flask-idempotency console", signer_kwargs=how)
