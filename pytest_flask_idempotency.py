"""The pytest plugin of Flask-Idempotency: a fixture for what ``flask_idempotency.testing`` offers.

A module of its own beside the package, because pytest imports it at every start: whatever is below
``flask_idempotency`` imports Flask with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from datetime import timedelta

    from flask import Flask


@pytest.fixture
def idempotency_age() -> Callable[[Flask, float | timedelta], None]:
    """Let the records of an application become older: ``idempotency_age(app, 24 * 3600)``."""
    from flask_idempotency.testing import age

    return age
