"""What the views share. The factory in ``app.py`` sets it up."""

from __future__ import annotations

from flask_idempotency import Idempotency

idempotency = Idempotency()
