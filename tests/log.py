"""The lines that the extension itself wrote: other loggers write what and when they like."""

from __future__ import annotations

import logging

import pytest


def ours(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[logging.LogRecord]:
    """Return the extension's lines of at least ``level``, in their order."""
    return [
        each
        for each in caplog.records
        if each.name.partition(".")[0] == "flask_idempotency" and each.levelno >= level
    ]


def undone(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that something committed is not there."""
    lines = [line.getMessage() for line in ours(caplog) if line.levelno == logging.WARNING]
    return [line for line in lines if "undone" in line]
