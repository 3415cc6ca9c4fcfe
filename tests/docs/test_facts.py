"""What a page lists is what the code has: one row for each list.

Settings, options and the help of commands are compared whole, by tests of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import blinker
import pytest

import flask_idempotency
from flask_idempotency.cli import cli
from flask_idempotency.cli.listing import STATES
from flask_idempotency.client import IdempotentSession
from flask_idempotency.core.errors import Problem
from flask_idempotency.core.records import NEVER_STORED, NOT_STORED, TRACEPARENT
from flask_idempotency.integrations.opentelemetry import NOT_ATTRIBUTES
from flask_idempotency.stores.lock import TIMEOUT_SECONDS
from flask_idempotency.web.settings import OPTIONS, SETTINGS, RunOptions, Settings
from flask_idempotency.web.signals import Event
from tests.docs.pages import ROOT

PROBLEMS = {(str(p.status), p.type, p.__name__) for p in Problem.__subclasses__()}
SIGNALS = {
    name
    for name in flask_idempotency.__all__
    if isinstance(getattr(flask_idempotency, name), blinker.NamedSignal)
}
OUTCOMES = re.findall(
    r"\"(\w+)\"", str(Event.__doc__).partition(":param outcome:")[2].partition(":param")[0]
)
HEADERS = NEVER_STORED - {TRACEPARENT}
ATTRIBUTES = {field.name for field in dataclasses.fields(Event)} - NOT_ATTRIBUTES
STATUSES = {str(status) for status in NOT_STORED}


def after(start: str, end: str, pattern: str) -> Callable[[str], set[str]]:
    """Find ``pattern`` between two texts of a page."""

    def find(page: str) -> set[str]:
        part = page.partition(start)[2].partition(end)[0]
        assert part, f"the page does not say {start!r}"
        return set(re.findall(pattern, part))

    return find


def rows(pattern: str) -> Callable[[str], set[str]]:
    """Find ``pattern`` at the beginnings of a page's lines."""
    return lambda page: set(re.findall(pattern, page, re.MULTILINE))


def statuses(start: str, end: str) -> Callable[[str], set[str]]:
    return after(start, end, r"\b4\d\d\b")


CALLERS = "../example/recipes/callers.md"
PROBLEM_ROW = re.compile(r"(?m)^\|.*\| (\d{3}) \| `([a-z-]+)` \| .*? \| `(\w+)` \|$")


def named_headers(page: str) -> set[str]:
    return {name.lower() for name in after("**Which headers.**", "A header", r"`([\w-]+)`")(page)}


def options_of_run(page: str) -> set[str]:
    [part] = re.findall(r"Idempotency\.run`[^.]*: (`[^.]*)\.", page.replace("\n", " "))
    return set(re.findall(r"`([a-z_]+)`", part))


def deadline(page: str, start: str, end: str) -> Any:
    return pytest.param(page, after(start, end, r"\d+"), {str(IdempotentSession.deadline)})


@pytest.mark.parametrize(
    ("page", "listed", "real"),
    [
        pytest.param("http.md", lambda page: set(PROBLEM_ROW.findall(page)), PROBLEMS, id="problems"),
        ("http.md", statuses("below 500 is stored, except", "."), STATUSES),
        ("http.md", named_headers, HEADERS),
        ("monitoring.md", rows(r"^\| `idempotency\.(\w+)` \|"), ATTRIBUTES),
        ("monitoring.md", after("`idempotency.outcome` | ", "\n", r"`(\w+)`"), set(OUTCOMES)),
        ("api.md", rows(r"^\.\. py:data:: ((?:operation|store)_\w+)"), SIGNALS),
        ("api.md", after("| State |", "\n\n", r"(?m)^\| `(\w+)` \|"), set(STATES)),
        ("configuration.md", options_of_run, set(RunOptions.__annotations__)),
        ("go-live.md", after("**Time-outs** are ", " for a reply", r"[\d.]+"), {str(TIMEOUT_SECONDS)}),
        (CALLERS, after("remember a key for ", " hours", r"\d+"), {f"{Settings.ttl / 3600:g}"}),
        deadline("clients.md", "The deadline, ", " seconds"),
        deadline(CALLERS, "name, deadline=", ")"),
        deadline(CALLERS, "retries = Infinity, deadline = ", "_000"),
        deadline(CALLERS, "((SECONDS + pause < ", "))"),
        deadline("runbook.md", "ours do for ", " seconds"),
        deadline("go-live.md", "`deadline` of our sessions | ", " s"),
    ],
)
def test_a_page_lists_what_the_code_has(page, listed, real):
    assert listed((ROOT / "docs" / page).read_text(encoding="utf-8")) == set(real)


@pytest.mark.parametrize("page", ["clients.md", CALLERS])
def test_callers_are_told_of_problems_by_their_status(page):
    text = re.sub(r"(?ms)^```.*?^```$", "", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    kinds = {kind: status for status, kind, _ in PROBLEMS}
    families = "|".join(sorted({kind.partition("-")[0] for kind in kinds}))
    named = re.findall(rf"(?:\b([45]\d\d) )?`((?:{families})-[a-z-]+)`", text)
    assert len(named) >= 5
    assert [(status, kind) for status, kind in named if status not in {"", kinds.get(kind)}] == []
    copied = text.partition("\n---\n")[2]  # into other documentation, where our links would be dead
    assert not re.search(r"\]\(|\{\w+\}`|Flask|flask", copied)


def test_the_public_face_is_as_small_as_it_was_decided():
    assert len(flask_idempotency.__all__) == 30
    assert len(SETTINGS) == 21
    assert len(OPTIONS) <= 18
    assert len(cli.commands) == 8


LOGS = {
    "warn",
    "tell_failure",
    *(f"log.{how}" for how in ("debug", "info", "warning", "error", "exception", "log")),
}
WITHOUT_TEXT = {"… failed"}  # what failed comes first, in words of the caller's


def logged() -> set[str]:
    """The texts that the package logs, with … for each value."""
    found = set()
    for path in (ROOT / "flask_idempotency").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in LOGS:
                texts = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
                found |= {re.sub(r"%\.?\d*[a-z]", "…", text) for text in texts if " " in text}
    return found - WITHOUT_TEXT


def test_the_runbook_lists_every_line_of_the_log():
    page = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([^`\n]{12,})`", page)
    listed += re.findall(r"(?m)^[A-Z]{4,} (.*?)(?:\.\.\.)?$", page)
    parts = [re.sub("^[A-Z]{4,} ", "", text).split("…") for text in listed]
    patterns = [".*".join(map(re.escape, each)) for each in parts]
    texts = logged()
    assert len(texts) > 10
    assert {text for text in texts if not any(re.search(each, text) for each in patterns)} == set()
