"""Patience, which observing has little of."""

import pytest

from flask_idempotency.web.background import observer


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a question may take longer than any application should wait."""
    monkeypatch.setattr(observer, "PATIENCE_SECONDS", 10.0)
