"""Verdicts of this room, beside those of the differential suite."""

from __future__ import annotations

from dataclasses import dataclass

from tests.differential.harness import Either, Equal, NothingKept, Outcome, Refused


@dataclass(frozen=True)
class Sound(Equal):
    """Equal, and no row is committed by a request that failed, as it may be without us."""

    def problems(self, outcome: Outcome) -> list[str]:
        found, rows = super().problems(outcome), outcome.protected.rows
        for step in outcome.protected.steps:
            if (step.reply.status or 500) >= 500 and step.rows != rows:
                found.append(f"{step.label}: failed, but there are {step.rows} after {rows}")
            rows = step.rows
        return found


@dataclass(frozen=True)
class Noted(Equal):
    """Equal but for what the view notes, which is this with us: a difference by design."""

    notes: tuple[str, ...]

    def problems(self, outcome: Outcome) -> list[str]:
        steps = outcome.protected.steps[::2]
        return [
            *(line for line in super().problems(outcome) if ", notes" not in line),
            *(f"{step.label}: notes {step.notes}" for step in steps if step.notes != self.notes),
        ]


@dataclass(frozen=True)
class Named:
    """Every request is a 500 by this error, and nothing is committed."""

    error: str

    def problems(self, outcome: Outcome) -> list[str]:
        errors = [[error.name for error in step.reply.errors] for step in outcome.protected.steps]
        return [
            *NothingKept(500).problems(outcome),
            *(f"{names}, not {self.error}" for names in errors if self.error not in names),
        ]


@dataclass(frozen=True)
class NothingAfterIt:
    """Every request is a 500, and of its payments only the first, committed past us, is there."""

    def problems(self, outcome: Outcome) -> list[str]:
        found = []
        for step in outcome.protected.steps:
            if step.reply.status != 500:
                found.append(f"{step.label}: {step.reply.status}, not 500")
            found += [
                f"{step.label}: {row}" for row in step.rows["payment"] if '"amount": 1}' not in row
            ]
        return found


SOUND_OR_REFUSED = Either((Sound(), Refused(), NothingKept()))
"""Also where the view fails without us, too: by whatever name, and with nothing committed."""
SOUND_OR_FAILED = Either((Sound(), Refused(), NothingKept(500)))
"""Where the driver refuses for us: its error has no name of ours, and nothing is committed."""
