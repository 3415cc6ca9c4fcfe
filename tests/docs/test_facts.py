"""What a page lists is what the code has: one row for each list.

Settings, options and the help of commands are compared whole, by tests of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Collection

import blinker
import pytest

import flask_idempotency
from flask_idempotency.cli import cli
from flask_idempotency.cli.listing import STATES
from flask_idempotency.client import IdempotentSession
from flask_idempotency.core.errors import Problem
from flask_idempotency.core.storable import NEVER_STORED, NOT_STORED, TRACEPARENT
from flask_idempotency.integrations.opentelemetry import NOT_ATTRIBUTES
from flask_idempotency.stores.lock import PAUSE_SECONDS, PROBE_AFTER_SECONDS, TIMEOUT_SECONDS
from flask_idempotency.web.settings import OPTIONS, SETTINGS, RunOptions, Settings
from flask_idempotency.web.signals import Event
from tests.docs.pages import ROOT

DEFAULTS = {name.upper(): getattr(Settings, name) for name in Settings.__annotations__}
PROBLEMS = {(p.__name__, str(p.status), p.type) for p in Problem.__subclasses__()}
SIGNALS = {
    name
    for name in flask_idempotency.__all__
    if isinstance(getattr(flask_idempotency, name), blinker.NamedSignal)
}
OUTCOMES = re.findall(
    r"\"(\w+)\"", str(Event.__doc__).partition(":param outcome:")[2].partition(":param")[0]
)
HEADERS = NEVER_STORED - {TRACEPARENT}
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


FACTS: list[tuple[str, str, Callable[[str], set[str]], Collection[object]]] = [
    (
        "the problems with status and type",
        "http.md",
        lambda page: {
            (name, status, kind)
            for status, kind, name in re.findall(
                r"^\|.*\| (\d{3}) \| `([a-z-]+)` \| .*? \| `(\w+)` \|$", page, re.MULTILINE
            )
        },
        PROBLEMS,
    ),
    ("statuses not stored", "http.md", statuses("below 500 is stored, except", "."), STATUSES),
    (
        "statuses not stored",
        "guarantees.md",
        statuses("not stored (500 and above,", ")"),
        STATUSES,
    ),
    (
        "headers not stored",
        "http.md",
        lambda page: {
            name.lower() for name in after("**Which headers.**", "A header", r"`([\w-]+)`")(page)
        },
        HEADERS,
    ),
    (
        "a span's attributes",
        "monitoring.md",
        rows(r"^\| `idempotency\.(\w+)` \|"),
        {field.name for field in dataclasses.fields(Event)} - NOT_ATTRIBUTES,
    ),
    ("outcomes", "monitoring.md", after("`idempotency.outcome` | ", "\n", r"`(\w+)`"), set(OUTCOMES)),
    ("signals", "api.md", rows(r"^\.\. py:data:: ((?:operation|store)_\w+)"), SIGNALS),
    ("states", "api.md", after("| State |", "\n\n", r"(?m)^\| `(\w+)` \|"), set(STATES)),
    *(
        (
            "options of run",
            page,
            lambda page: set(
                re.findall(
                    r"`([a-z_]+)`",
                    re.findall(r"Idempotency\.run`[^.]*: (`[^.]*)\.", page.replace("\n", " "))[0],
                )
            ),
            set(RunOptions.__annotations__),
        )
        for page in ("configuration.md",)
    ),
    ("Redis' limit", "go-live.md", after("**Time-outs** are ", " for a reply", r"[\d.]+"), {"0.05"}),
    *(
        ("the client's deadline", page, after(*words, r"\d+"), {str(IdempotentSession.deadline)})
        for page, *words in [
            ("clients.md", "The deadline, ", " seconds"),
            ("../example/recipes/callers.md", "name, deadline=", ")"),
            ("../example/recipes/callers.md", "retries = Infinity, deadline = ", "_000"),
            ("../example/recipes/callers.md", "((SECONDS + pause < ", "))"),
            ("runbook.md", "ours do for ", " seconds"),
            ("go-live.md", "`deadline` of our sessions | ", " s"),
        ]
    ),
    ("the pause", "go-live.md", after("do without Redis for ", " seconds", r"\w+"), {"two"}),
]


@pytest.mark.parametrize(
    ("what", "page", "listed", "real"), FACTS, ids=[f"{what}, {page}" for what, page, *_ in FACTS]
)
def test_a_page_lists_what_the_code_has(what, page, listed, real):
    found = listed((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert found == set(real), f"{page}: {what}"


def test_the_public_face_is_as_small_as_it_was_decided():
    assert len(flask_idempotency.__all__) == 30
    assert len(SETTINGS) == 21
    assert len(OPTIONS) <= 18
    assert len(cli.commands) == 8


def test_the_words_of_the_table_are_these_numbers():
    assert (TIMEOUT_SECONDS, PAUSE_SECONDS) == (0.05, 2)
    assert (PROBE_AFTER_SECONDS, DEFAULTS["TTL"]) == (1, 86400)


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
