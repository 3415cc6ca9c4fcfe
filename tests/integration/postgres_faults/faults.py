"""What the faults of PostgreSQL share: settings, and a fault that happens once."""

from __future__ import annotations

from collections.abc import Callable


def first_time(fault: Callable[[], object]) -> Callable[[], None]:
    """The fault happens in the first attempt only."""
    left = [fault]

    def during() -> None:
        if left:
            left.pop()()

    return during


def settings(**values):
    """Engine options that set Postgres's settings for each connection."""
    options = " ".join(f"-c {name}={value}" for name, value in values.items())
    return {"SQLALCHEMY_ENGINE_OPTIONS": {"connect_args": {"options": options}}}
