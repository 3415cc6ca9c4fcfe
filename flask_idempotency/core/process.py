"""Which process this is: what was begun before a fork is the parent's, and a child has no part in it.

The core notices no fork. Whoever does calls :meth:`Here.fork`, in the child.
"""

from __future__ import annotations

FORKED = (
    "This process was forked inside the operation, which its parent goes on with: it can neither end"
    " the operation nor take a step of it."
)

INHERITED = (
    "this process was forked in the view of an operation, and db.session was in the middle of its"
    " transaction, which is the parent's: use another session in the child, in an application context"
    " of its own (with app.app_context():) or after db.session.remove()"
)


class Process:
    """One process. ``is_parent`` is true of it in each child that was forked since."""

    is_parent = False


class Here:
    """Where the present process is found."""

    def __init__(self) -> None:
        self.process = Process()

    def fork(self) -> None:
        """This is a child, from now on a process of its own."""
        self.process.is_parent = True
        self.process = Process()


here = Here()
