"""A small payments API whose writes are safe to retry."""

from example.app import create_app

__all__ = ["create_app"]
