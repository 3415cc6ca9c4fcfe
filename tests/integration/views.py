"""The one protected view of an application that is tested in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask_idempotency import idempotent


def protect(world: Any, view: Callable[..., Any], **options: Any) -> None:
    """Make a function the view of POST /payments."""
    world.app.add_url_rule("/payments", "pay", idempotent(**options)(view), methods=["POST"])
