"""The command group ``flask idempotency``: what an operator does with the records."""

from . import decisions, erasure, records, routes, upkeep  # noqa: F401  # they add their commands to the group
from .group import cli

__all__ = ["cli"]
