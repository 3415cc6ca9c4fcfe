"""What can be known of the server that the application runs in."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("flask_idempotency")


def worker_timeout() -> float:
    """After how many seconds gunicorn kills a worker that is stuck; 0 if it does not, or is not known.

    gunicorn tells applications nothing of its configuration. But it calls them, so its own objects
    are further up the stack while they are made.
    """
    frame = sys._getframe()  # noqa: SLF001 -- documented, and here in CPython and PyPy
    while frame := frame.f_back:  # type: ignore[assignment]
        if str(frame.f_globals.get("__name__")).startswith("gunicorn."):
            cfg = getattr(frame.f_locals.get("self"), "cfg", None)
            if cfg is not None:
                return float(getattr(cfg, "timeout", 0))
    return 0.0


def warn_if_short(lease_seconds: float, timeout_seconds: float, what: str) -> None:
    """Log that a lease ends before the server gives its worker up."""
    if lease_seconds < timeout_seconds:
        log.warning(
            "%s is a lease of %g s, shorter than gunicorn's timeout of %g s: a request that is slow,"
            " but alive, may be taken for interrupted",
            what,
            lease_seconds,
            timeout_seconds,
        )
