"""The stores that a test runs on."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool

BOTH = pytest.mark.parametrize("store", ["hybrid", "postgres"], indirect=True)
"""For a test in which the lock in Redis can matter: somebody meets an attempt that runs, or died."""


MEMORY = Path("/dev/shm")
"""Where a file of SQLite is made, and written, twice as fast."""


def prefix_of(database: Any) -> str:
    """What the store ``redis`` needs: the ``IDEMPOTENCY_REDIS_PREFIX`` of one test's database."""
    return f"{hashlib.sha256(str(database).encode()).hexdigest()[:12]}:"


def on_sqlite(owner: Any) -> dict[str, Any]:
    """The configuration of an application with a SQLite file, which is there as long as ``owner``."""
    folder = tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None)
    # A process that a test forked may have done it before, with its copy of what nobody uses any more.
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return {
        "SQLALCHEMY_DATABASE_URI": f"sqlite:///{folder}/shop.db",
        "SQLALCHEMY_ENGINE_OPTIONS": {"poolclass": NullPool},  # nobody closes them
        "IDEMPOTENCY_STORE": "sql",
    }
