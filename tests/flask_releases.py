"""What Flask's releases do differently, for tests."""

from __future__ import annotations

from flask import request


def let_go(_error: BaseException | None) -> None:
    """Free the request at its end, as Flask does up to 3.1. From 3.2 on its own environ keeps it."""
    request.environ.pop("werkzeug.request")
