"""The log of the package."""

from __future__ import annotations

from contextlib import suppress
from logging import LoggerAdapter, getLogger
from typing import Any


class Log(LoggerAdapter):  # type: ignore[type-arg] # no generic before Python 3.11
    """A logger that raises no ``Exception``: no response, no retry, no operator's act depends on it.

    The application's own filters and handlers may fail, and its records may already have an attribute
    with the name of one in ``extra``: then the line is written without ``extra``.
    """

    def __init__(self, name: str) -> None:
        super().__init__(getLogger(name), {})

    def log(self, level: int, msg: object, *args: object, **how: Any) -> None:
        """Log a line, like ``Logger.log``."""
        with suppress(Exception):
            try:
                self.logger.log(level, msg, *args, stacklevel=2, **how)
            except KeyError:  # what logging raises rather than overwrite an attribute
                self.logger.log(level, msg, *args, stacklevel=2, **{**how, "extra": None})


log = Log("flask_idempotency")
