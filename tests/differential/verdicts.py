"""What a case of the differential suite expects: equal, refused by name, or different by design.

A verdict reads an outcome and gives the lines in which it is not what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.differential.harness import Outcome

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"


class Verdict(Protocol):
    """What is expected of an outcome."""

    def problems(self, outcome: Outcome) -> list[str]:
        """Where the outcome is not what was expected; empty if it is."""


@dataclass(frozen=True)
class Equal:
    """The protected application does what the plain one does."""

    def problems(self, outcome: Outcome) -> list[str]:
        return outcome.differences


@dataclass(frozen=True)
class Refused:
    """Every request fails by name, nothing of the application is committed, nothing stays behind.

    ``pattern`` is searched for in the message of the ``NotAtomic`` that left the application. Rows of
    the tables named in ``besides`` may be there: the case commits them on purpose elsewhere.
    """

    pattern: str = ""
    besides: tuple[str, ...] = ()

    def problems(self, outcome: Outcome) -> list[str]:
        found, seen = [], outcome.protected
        for step in seen.steps:
            if step.reply.status != 500 or step.reply.replayed:
                found.append(f"{step.label}: not refused, but answered {step.reply}")
            named = [error for error in step.reply.errors if error.name == "NotAtomic"]
            if not any(re.search(self.pattern, error.message) for error in named):
                found.append(f"{step.label}: no NotAtomic {self.pattern!r} in {step.reply.errors}")
            for table in sorted(step.rows.keys() | seen.rows.keys()):
                before, after = seen.rows.get(table, []), step.rows.get(table, [])
                if table not in self.besides and before != after:
                    found.append(f"{step.label}: refused, but {table} has {after} after {before}")
            found += [f"{step.label}: left {x}" for x in sorted(step.state - seen.state)]
        found += [f"a record says {record}" for record in seen.records if record[0] == "completed"]
        if seen.write.status != 201:
            found.append(f"the next write was answered {seen.write}: {seen.write.errors}")
        return found


@dataclass(frozen=True)
class Either:
    """One of several verdicts: which of them is free."""

    verdicts: tuple[Verdict, ...]

    def problems(self, outcome: Outcome) -> list[str]:
        found = [verdict.problems(outcome) for verdict in self.verdicts]
        if not all(found):
            return []
        return [
            f"neither {type(verdict).__name__}: {line}"
            for verdict, lines in zip(self.verdicts, found, strict=True)
            for line in lines
        ]


@dataclass(frozen=True)
class ByDesign:
    """Different on purpose: a sentence of the guarantees says so, and ``check`` says how."""

    sentence: str
    check: Callable[[Outcome], list[str]]

    def problems(self, outcome: Outcome) -> list[str]:
        found = list(self.check(outcome))
        if not is_on_the_page(self.sentence):
            found.append(f"docs/guarantees.md does not say: {self.sentence}")
        return found


@dataclass(frozen=True)
class NothingKept:
    """Every request runs the view and is answered as in the plain application, or with ``status``.

    Nothing is committed, and no record is finished.
    """

    status: int | None = None

    def problems(self, outcome: Outcome) -> list[str]:
        found, seen = [], outcome.protected
        for one, step in zip(outcome.plain.steps, seen.steps, strict=True):
            if step.rows != seen.rows:
                found.append(f"{step.label}: rows {step.rows}")
            if step.reply.replayed:
                found.append(f"{step.label}: replayed {step.reply}")
            if self.status is None and str(one.reply) != str(step.reply):
                found.append(f"{step.label}: plain {one.reply}, protected {step.reply}")
            elif self.status is not None and step.reply.status != self.status:
                found.append(f"{step.label}: {step.reply}, not {self.status}")
        return found + [f"a record {record}" for record in seen.records if record[0] == "completed"]


EQUAL = Equal()
EQUAL_OR_REFUSED = Either((EQUAL, Refused()))


@cache
def is_on_the_page(sentence: str) -> bool:
    """Whether the guarantees say so, in whatever case and quotes."""
    page, words = (
        " ".join(re.sub("[`*]", "", text).casefold().split())
        for text in (GUARANTEES.read_text("utf-8"), sentence)
    )
    return words in page
