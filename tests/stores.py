"""The stores that a test runs on."""

from __future__ import annotations

import pytest

BOTH = pytest.mark.parametrize("store", ["hybrid", "postgres"], indirect=True)
"""For a test in which the lock in Redis can matter: somebody meets an attempt that runs, or died."""
