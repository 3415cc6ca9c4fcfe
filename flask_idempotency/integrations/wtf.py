"""The hidden field as a field of a Flask-WTF form: ``pip install 'flask-idempotency[wtf]'``."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.web.forms import FIELD, new_value

from . import required

with required("Flask-WTF", extra="wtf"):
    from wtforms import HiddenField


class IdempotencyField(HiddenField):
    """A hidden field that is the form's idempotency key; ``form.hidden_tag()`` renders it too.

    Its name in the form must be ``idempotency_key``. ``endpoint`` is that of
    ``idempotency_field``. It needs no validator: the protected view checks it before the form exists.
    Each rendering has a new key, never the one that was sent: a form shown again for correction is
    another operation.
    """

    def __init__(self, *, endpoint: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._endpoint = endpoint

    def _value(self) -> str:
        return new_value(self._endpoint)

    def __call__(self, **options: object) -> Markup:
        """The field as HTML. Raises ``ConfigurationError`` if it does not have the configured name."""
        if self.name != FIELD:
            raise ConfigurationError(
                f"the IdempotencyField is called {self.name!r}; allowed: {FIELD!r}"
            )
        return super().__call__(**{"autocomplete": "off", **options})

    def populate_obj(self, obj: object, name: str) -> None:
        """Do nothing: the key is no part of the form's object."""
