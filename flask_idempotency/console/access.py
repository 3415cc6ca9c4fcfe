"""Who may see the pages, and that a form was sent from one of them.

A browser says of each form where it comes from: ``Sec-Fetch-Site`` over TLS and on localhost, and
``Origin``. No page can change either. So the console needs no session, no cookie and no token, and
works beside any way to sign in.
"""

from __future__ import annotations

from collections.abc import Callable

from flask import current_app, g, request
from werkzeug.wrappers import Response

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError
from flask_idempotency.operate.decide import Operator
from flask_idempotency.operate.words import one_line
from flask_idempotency.web.settings import SAFE_METHODS

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
    """The form was not sent from a page of this console. Behind a proxy, set up ProxyFix."""


def admit(authorize: Callable[[], object]) -> Response | None:
    """Let the request in, or return the response that refuses it.

    What ``authorize`` returns decides: a response is sent as it is, False, None and a blank text
    refuse, True lets in, and so does any other text, which says who acts. Raises :class:`FormRefused`
    for a form that another site has sent, and ``ConfigurationError`` for any other result.
    """
    found = current_app.ensure_sync(authorize)()
    if isinstance(found, Response):
        g.idempotency_is_theirs = True
        return found
    if not isinstance(found, (str, bool, type(None))):  # ("no", 401) would be true
        raise ConfigurationError(
            f"authorize returned a {type(found).__name__}; allowed: True, or a text that says who"
            " acts, to let in; False or None to refuse; a response object to send that"
        )
    name = SOMEBODY if found is True else one_line(found or "")
    if not name:
        return Response("You may not operate this application.\n", 403, mimetype="text/plain")
    g.idempotency_who = name
    if request.method not in SAFE_METHODS and not _is_own_form():
        raise FormRefused
    return None


def operator() -> Operator:
    """Who acts in the present request."""
    return Operator(g.idempotency_who, "console")


def secure(response: Response) -> Response:
    """Keep other sites, caches and frames away from a response, unless it is the application's."""
    if "idempotency_is_theirs" not in g:
        response.headers.update(_HEADERS)
    return response


def _is_own_form() -> bool:
    """Return True if the browser says that a page of this origin has sent the form."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site == "same-origin"
    return request.headers.get("Origin") == f"{request.scheme}://{request.host}"
