"""``docs/monitoring.md`` names what is on a span, and nothing else."""

from __future__ import annotations

import dataclasses
import re

from flask_idempotency import Event
from flask_idempotency.integrations.opentelemetry import NOT_ATTRIBUTES
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")


def test_every_attribute_is_named():
    section = PAGE.partition("## Attributes of the span\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `idempotency\.(\w+)` \|", section, re.MULTILINE)
    assert set(named) == {field.name for field in dataclasses.fields(Event)} - NOT_ATTRIBUTES


def test_every_outcome_is_named():
    said = str(Event.__doc__).partition(":param outcome:")[2].partition(":param")[0]
    listed = PAGE.partition("`idempotency.outcome` | ")[2].partition("\n")[0]
    assert re.findall(r"`(\w+)`", listed) == re.findall(r"\"(\w+)\"", said) != []
