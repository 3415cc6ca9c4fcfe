"""What pytest-flask stands on: its ``client`` and ``live_server`` serve the usual ``app``."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask


@pytest.fixture
def app(world: Any) -> Flask:
    return world.app


@pytest.fixture(autouse=True)
def _push_request_context() -> None:
    """Not pytest-flask's: a request in the context of another shares its ``g`` and its session."""
