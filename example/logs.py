"""The log: lines on standard error, where systemd or the container picks them up.

A line of Flask-Idempotency names its operation by ``id``, digits of the key's digest, never by the key.
The shop's own lines end with the same ``id``, so that one search finds all that became of a request.
"""

import logging
from contextlib import suppress

from flask import Flask

from flask_idempotency import current_operation


def with_operation(record: logging.LogRecord) -> bool:
    """Give a line of the shop the ``id`` of the operation that it was logged in."""
    record.id = "-"
    with suppress(RuntimeError):  # outside of a request, or no protected one
        record.id = current_operation.id
    return True


def configure(app: Flask) -> None:
    line = "%(asctime)s %(levelname)s %(name)s %(message)s"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(line + ", id %(id)s"))
    handler.addFilter(with_operation)
    logging.basicConfig(level=logging.WARNING, format=line)
    app.logger.handlers, app.logger.propagate = [handler], False
    for logger in app.logger, logging.getLogger("flask_idempotency"):
        logger.setLevel(logging.INFO)  # DEBUG has each outcome, which /metrics counts
