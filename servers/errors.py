"""What can go wrong with a throwaway server."""

from __future__ import annotations


class Unavailable(RuntimeError):
    """No server and no program was found, or the server would not start."""


class NotControllable(RuntimeError):
    """The server was given by the environment: it is not ours to kill or pause."""
