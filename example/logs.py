"""The log: lines on standard error, where systemd or the container picks them up.

A line of Flask-Idempotency names its operation by ``id``, digits of the key's digest, never by the key.
The shop's own lines end with the same ``id``, so that one search finds all that became of a request.
"""

import logging
from contextlib import suppress
from logging.config import dictConfig

from flask import Flask

from flask_idempotency import current_operation


class WithOperation(logging.Filter):
    """Gives each line of the shop the ``id`` of the operation that it was logged in."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "id"):
            record.id = "-"
            with suppress(RuntimeError):  # outside of a request, or no protected one
                record.id = current_operation.id
        return True


def configure(app: Flask) -> None:
    theirs = "%(asctime)s %(levelname)s %(name)s %(message)s"
    config = {"version": 1, "disable_existing_loggers": False}
    config["filters"] = {"operation": {"()": WithOperation}}
    config["formatters"] = {"theirs": {"format": theirs}, "ours": {"format": theirs + ", id %(id)s"}}
    stderr = {"class": "logging.StreamHandler", "formatter": "theirs"}
    config["handlers"] = {
        "stderr": stderr,
        "ours": {**stderr, "formatter": "ours", "filters": ["operation"]},
    }
    config["root"] = {"level": "WARNING", "handlers": ["stderr"]}
    config["loggers"] = {
        app.logger.name: {"level": "INFO", "handlers": ["ours"], "propagate": False},
        "flask_idempotency": {"level": "INFO"},  # DEBUG has each outcome, which /metrics counts
    }
    dictConfig(config)
