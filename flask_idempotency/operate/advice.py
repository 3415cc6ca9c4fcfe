"""What an operator should know before deciding: how far an operation came, and which decision fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flask_idempotency.stores.admin import Line, StepLine

_OWN_ROWS = "Look at your own rows first: what the view saved outside a step, it saves again."


@dataclass(frozen=True, slots=True)
class Advice:
    """How far an operation ``came``, and when to ``release`` or ``resolve`` it, each in sentences."""

    came: str
    release: str
    resolve: str

    @property
    def sentences(self) -> tuple[str, str, str]:
        """All of it, in the order in which it is read."""
        return self.came, self.release, self.resolve


def advise(line: Line, steps: Sequence[StepLine]) -> Advice | None:
    """The advice on an interrupted or failed operation, by its finished steps; None on any other.

    Resolving stores a response and nothing else: what the view had not yet done, above all rows of the
    application's own, is never done. Releasing repeats no finished step, but all else: whatever was cut
    off, and rows that the view has already saved outside a step.
    """
    if line.state not in ("interrupted", "failed"):
        return None
    if not steps:
        return Advice(
            "No step has finished: whatever the view does may or may not have happened. (If the view is"
            " atomic, none of it has.)",
            "Release it if the other service knows nothing of it, or recognises its key and repeats its"
            f" first response: the next retry runs the whole view. {_OWN_ROWS}",
            "Resolve it if the other service has done it and would do it again. First do by hand what"
            " the view does besides, such as saving rows of its own: the view never runs again.",
        )
    return Advice(
        f"Finished: {', '.join(step.name for step in steps)}. What comes next in the view may or may"
        " not have happened.",
        "Release it if the other service has done no more than that, or recognises the key of what came"
        f" next: the next retry repeats no finished step, and does the rest. {_OWN_ROWS}",
        "Resolve it only if nothing is left to do, or you have done it by hand: the view never runs"
        f" again, so it will not do what comes after {steps[-1].name}, such as saving rows of its own.",
    )
