"""The one protected view of an application that is tested in this process, and what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask_idempotency import idempotent


def protect(world: Any, view: Callable[..., Any], **options: Any) -> None:
    """Make a function the view of POST /payments."""
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])


def pay_once(world: Any) -> None:
    world.db.session.add(world.Payment(amount=1))
    world.db.session.commit()
