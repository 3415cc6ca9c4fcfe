"""The hidden field as a field of a Flask-WTF form: ``pip install 'flask-idempotency[wtf]'``."""

from __future__ import annotations

from typing import Any

from flask_idempotency.web.forms import FIELD, new_value

from . import required

with required("Flask-WTF", extra="wtf"):
    from wtforms import HiddenField


class IdempotencyField(HiddenField):
    """A hidden field that is the form's idempotency key; ``form.hidden_tag()`` renders it too.

    In HTML it is named ``idempotency_key``. ``endpoint`` is that of ``idempotency_field``. It needs no
    validator: the protected view checks it before the form exists. Each rendering has a new key.
    """

    def __init__(self, *, endpoint: str | None = None, **options: Any) -> None:
        super().__init__(**{"render_kw": {"autocomplete": "off"}, **options})
        self._endpoint, self.name = endpoint, FIELD

    def _value(self) -> str:
        return new_value(self._endpoint)

    def populate_obj(self, obj: object, name: str) -> None:
        """Do nothing: the key is no part of the form's object."""
