"""What was begun before a fork is the parent's, and a child has no part in it."""

from __future__ import annotations

import os

FORKED = (
    "This process was forked inside the operation, which its parent goes on with: it can neither end"
    " the operation nor take a step of it."
)

INHERITED = (
    "this process was forked in the view of an operation, and db.session was in the middle of that,"
    " which is the parent's: use another session in the child, in an application context of its own"
    " (with app.app_context():)"
)

number = os.getpid()
"""That of the present process. What was begun under another number is its parent's."""


def _number_child() -> None:
    global number  # noqa: PLW0603 -- asked so often that a call would be felt
    number = os.getpid()


os.register_at_fork(after_in_child=_number_child)
