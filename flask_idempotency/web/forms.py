"""The hidden field of a form: a signed idempotency key, for browsers, whose forms have no header.

Some browsers send one of their own, with a new key each time: the field wins.

The field holds a random key, made when the form is rendered, so that each form shown is one operation
however often it is sent. It is signed together with its time, its scope and its form: only this
application makes fields, and a form which one user loaded is rejected when another sends it. The
signature does not reveal the scope.

A field is valid for ``ttl``. Its record is younger, and lives ten minutes longer, as the clocks of
hosts may differ. So it exists while the field is valid, and a form that is sent again after its record
has expired is rejected as too old and never runs a second time. With ``refuse_old_keys``, the field's
time is the birth of its key: then a form that is too old is looked up first, as any such key is.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from contextlib import suppress

from flask import Flask, current_app
from itsdangerous import BadSignature, TimestampSigner
from markupsafe import Markup

from flask_idempotency.core.errors import ConfigurationError, KeyMalformed
from flask_idempotency.core.fingerprint import Form
from flask_idempotency.core.keys import Scope, hash_key

from .routes import app_state, resolved, route_of
from .settings import Route

FIELD = "idempotency_key"
"""The name of the field."""

KEY_BYTES = 16
"""Random bytes of a key: two forms never have the same one."""


def idempotency_field(endpoint: str | None = None) -> Markup:
    """A hidden field for a template, with a new key each time.

    ``endpoint`` is the full name of the view that the form is sent to: the field is good for that view
    only, and has the scope of its options. Raises
    ``ConfigurationError`` without a ``SECRET_KEY``, and for an endpoint that is not protected.
    """
    # Without autocomplete="off", Firefox keeps the values of fields, even hidden ones, over a reload.
    tag = '<input type="hidden" name="{}" value="{}" autocomplete="off">'
    return Markup(tag).format(FIELD, new_value(endpoint))  # noqa: S704 -- format() escapes


def new_value(endpoint: str | None = None) -> str:
    """The value of such a field: key, time and signature."""
    state = app_state(current_app)
    given = Route() if endpoint is None else route_of(state, endpoint, "POST")
    if given is None:
        raise ConfigurationError(f"idempotency_field: {endpoint} is not a protected endpoint for POST")
    route = resolved(state, given, endpoint or "")
    scope = route.current_scope(required=False)
    return _signer(state.app, scope, route.name).sign(secrets.token_urlsafe(KEY_BYTES)).decode()


def value_of_field(form: Form) -> str | None:
    """The value of the form's field; None without one. Raises ``KeyMalformed`` for more than one."""
    values = [str(value) for name, value, *of_file in form if name == FIELD and not of_file]
    if len(values) > 1:
        raise KeyMalformed(f"The field {FIELD} occurs more than once.")
    return values[0] if values else None


def read_field(value: str, app: Flask, route: Route, scope: Scope) -> tuple[str, float]:
    """The key of a field, and when it was made, in seconds since 1970. Raises ``KeyMalformed``."""
    for form in "", route.name:
        with suppress(BadSignature, ConfigurationError):
            key, made = _signer(app, scope, form).unsign(value, return_timestamp=True)
            if not route.refuse_old_keys and time.time() - made.timestamp() > route.ttl:
                raise KeyMalformed("The form is too old. If it was never sent, load it again.")
            return key.decode(), made.timestamp()
    raise KeyMalformed(
        f"The field {FIELD} was changed, was loaded by another user, or belongs to another endpoint."
        " Load the form again."
    )


def _signer(app: Flask, scope: Scope, form: str) -> TimestampSigner:
    """What signs the fields of a form, or of any form (``""``), that was loaded in a scope."""
    if not app.secret_key:
        raise ConfigurationError("idempotency_field() signs its values: set SECRET_KEY")
    older = app.config.get("SECRET_KEY_FALLBACKS") or ()  # new in Flask 3.1
    keys = [*older, app.secret_key]  # the newest last, as itsdangerous wants them
    salt = hash_key("form", form, scope, "")
    return TimestampSigner(keys, salt, key_derivation="hmac", digest_method=hashlib.sha256)
