"""The command group ``flask idempotency``: what an operator does with the records."""

# These add their commands to the group.
from . import decisions, listing, upkeep  # noqa: F401
from .group import cli

__all__ = ["cli"]
