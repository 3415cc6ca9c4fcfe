"""What a page lists is what the code has: one row for each list. A failure shows the text to paste."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree as ET

import blinker
import pytest

import flask_idempotency
from flask_idempotency.cli import cli
from flask_idempotency.cli.listing import STATES
from flask_idempotency.client import IdempotentSession
from flask_idempotency.core.errors import Problem
from flask_idempotency.core.machine import Situation
from flask_idempotency.core.records import NEVER_STORED, NOT_STORED, TRACEPARENT
from flask_idempotency.integrations.opentelemetry import NOT_ATTRIBUTES
from flask_idempotency.stores.lock import TIMEOUT_SECONDS
from flask_idempotency.web.settings import OPTIONS, PREFIX, SETTINGS, RouteOptions, RunOptions, Settings
from flask_idempotency.web.signals import Event
from tests.docs.pages import PAGES, ROOT, name_of

PUBLIC = flask_idempotency.__all__
PROBLEMS = {(str(p.status), p.type, p.__name__) for p in Problem.__subclasses__()}
SIGNALS = [name for name in PUBLIC if isinstance(getattr(flask_idempotency, name), blinker.NamedSignal)]
OUTCOMES = re.findall(r":param outcome:(.*?):param", str(Event.__doc__), re.DOTALL)[0]
OUTCOMES = re.findall(r"\"(\w+)\"", OUTCOMES)
STATUSES, TIMEOUT = {str(status) for status in NOT_STORED}, {str(TIMEOUT_SECONDS)}
ATTRIBUTES = {field.name for field in dataclasses.fields(Event)} - NOT_ATTRIBUTES
DEADLINE = {str(IdempotentSession.deadline)}
CALLERS = "example/recipes/callers.md"


def after(start: str, end: str, pattern: str) -> Callable[[str], Any]:
    """Find ``pattern`` between two texts of a page."""

    def find(page: str) -> list[Any]:
        part = page.partition(start)[2].partition(end)[0]
        assert part, f"the page does not say {start!r}"
        return re.findall(pattern, part)

    return find


def rows(pattern: str) -> Callable[[str], Any]:
    """Find ``pattern`` at the beginnings of a page's lines."""
    return lambda page: re.findall(pattern, page, re.MULTILINE)


def named_headers(page: str) -> list[str]:
    return [name.lower() for name in after("**Which headers.**", "A header", r"`([\w-]+)`")(page)]


def options_of_run(page: str) -> list[str]:
    [part] = re.findall(r"Idempotency\.run`[^.]*: (`[^.]*)\.", page.replace("\n", " "))
    return re.findall(r"`([a-z_]+)`", part)


def states_drawn(picture: str) -> list[str]:
    texts = ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")  # noqa: S314  # ours
    return [str(each.text) for each in texts if "state" in (each.get("class") or "").split()]


def public_names(page: str) -> set[str]:
    found = rows(
        r"^(?:\.\. (?:py:|auto)(?!currentmodule)\w+::| {17}) (?:flask_idempotency\.)?([\w.]+)"
    )(page)
    return {name for name in found if "." not in name} - {"idempotency_field"}


PROBLEM_ROW = r"^\|.*\| (\d{3}) \| `([a-z-]+)` \| .*? \| `(\w+)` \|$"
HELP = r"^### ([\w-]+)\n\n```\{command\} \1\n```$"


@pytest.mark.parametrize(
    ("page", "listed", "real"),
    [
        pytest.param("docs/http.md", rows(PROBLEM_ROW), PROBLEMS, id="problems"),
        ("docs/http.md", after("below 500 is stored, except", ".", r"\b4\d\d\b"), STATUSES),
        ("docs/http.md", named_headers, NEVER_STORED - {TRACEPARENT}),
        ("docs/monitoring.md", rows(r"^\| `idempotency\.(\w+)` \|"), ATTRIBUTES),
        ("docs/monitoring.md", after("`idempotency.outcome` | ", "\n", r"`(\w+)`"), OUTCOMES),
        ("docs/api.md", rows(r"^\.\. py:data:: ((?:operation|store)_\w+)"), SIGNALS),
        ("docs/api.md", after("| State |", "\n\n", r"(?m)^\| `(\w+)` \|"), STATES),
        ("docs/api.md", public_names, PUBLIC),
        ("docs/api.md", rows(HELP), cli.commands),
        ("docs/pictures/states.svg", states_drawn, STATES),
        ("docs/configuration.md", options_of_run, RunOptions.__annotations__),
        ("docs/go-live.md", after("**Time-outs** are ", " for a reply", r"[\d.]+"), TIMEOUT),
        (CALLERS, after("remember a key for ", " hours", r"\d+"), {f"{Settings.ttl / 3600:g}"}),
        ("docs/clients.md", after("The deadline, ", " seconds", r"\d+"), DEADLINE),
        (CALLERS, after("name, deadline=", ")", r"\d+"), DEADLINE),
        (CALLERS, after("retries = Infinity, deadline = ", "_000", r"\d+"), DEADLINE),
        (CALLERS, after("((SECONDS + pause < ", "))", r"\d+"), DEADLINE),
        ("docs/runbook.md", after("ours do for ", " seconds", r"\d+"), DEADLINE),
        ("docs/go-live.md", after("`deadline` of our sessions | ", " s", r"\d+"), DEADLINE),
    ],
)
def test_a_page_lists_what_the_code_has(page, listed, real):
    assert set(listed((ROOT / page).read_text(encoding="utf-8"))) == set(real)


def test_the_picture_of_the_states_names_each_situation():
    picture = (ROOT / "docs/pictures/states.svg").read_text(encoding="utf-8").replace("_", " ")
    assert [each.value for each in Situation if each.value not in picture] == []


def test_the_public_face_and_the_pages_are_as_small_as_it_was_decided():
    assert (len(PUBLIC), len(SETTINGS), len(cli.commands)) == (30, 21, 8)
    assert set(PUBLIC) <= set(dir(flask_idempotency))
    assert len(OPTIONS) <= 18
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 20
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 30_000


LOGS = {f"log.{how}" for how in ("debug", "info", "warning", "error", "exception", "log")}
LOGS |= {"warn", "tell_failure"}


def logged() -> set[str]:
    """The texts that the package logs, with … for each value."""
    found = set()
    for path in (ROOT / "flask_idempotency").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in LOGS:
                texts = [str(each.value) for each in call.args if isinstance(each, ast.Constant)]
                found |= {re.sub(r"%\.?\d*[a-z]", "…", text) for text in texts if " " in text}
    return found - {"… failed"}  # what failed comes first, in words of the caller's


def test_the_runbook_lists_every_line_of_the_log():
    page = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([^`\n]{12,})`", page)
    listed += re.findall(r"(?m)^[A-Z]{4,} (.*?)(?:\.\.\.)?$", page)
    parts = [re.sub("^[A-Z]{4,} ", "", text).split("…") for text in listed]
    patterns = [".*".join(map(re.escape, each)) for each in parts]
    assert len(logged()) > 10
    assert [text for text in logged() if not any(re.search(each, text) for each in patterns)] == []


DEFAULTS = {
    "key": "the header `IDEMPOTENCY_HEADER`",
    "scope": "the application's",
    "store": "all except 401, 403, 408, 425 and 429, and in atomic operations those of 500 and above",
    "max_request_bytes": "the application's limits",
    "name": "the endpoint",
    "authorize_replay": "every replay is allowed",
    "other_binds": "none",
}
"""Where neither a setting of the same name nor the value in ``Route`` says it."""


def settings_listed(heading: str) -> list[str]:
    """The rows of the page's table with this heading."""
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    head = re.escape(f"| {heading} | Default | Meaning |\n|---|---|---|\n")
    (found,) = re.findall(rf"(?m)^{head}((?:\|.*\n)+)", page)
    return str(found).splitlines()


def row(name: str, default: str, meaning: str, rule: Any) -> str:
    return f"| `{name}` | {default} | {meaning} Allowed: {rule.metadata['allowed']}. |"


def shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    unit = " (one day)" if value == 86400 else ""
    if isinstance(value, int) and value and value % 1024**2 == 0:
        unit = f" ({value // 1024**2} MiB)"
    return f"`{value!r}`{unit}"


def test_each_setting_has_its_name_default_and_what_is_allowed():
    """What it means, the page alone says."""
    meaning = re.compile(r"^((?:\|[^|]*){2}\| ).*Allowed: ")
    without = [meaning.sub(r"\1… Allowed: ", each) for each in settings_listed("Setting")]
    assert without == [row(name, shown(each.default), "…", each) for name, each in SETTINGS.items()]


def options() -> Iterator[str]:
    for name, meaning in re.findall(
        r"\* ``(\w+)``: (.*?)(?=\n\s*\n|\n\s*\* ``|\Z)", RouteOptions.__doc__ or "", re.DOTALL
    ):
        setting = f"{PREFIX}{name.upper()}"
        value = setting if setting in SETTINGS else repr(OPTIONS[name].default)
        text = " ".join(meaning.split())
        yield row(name, DEFAULTS.get(name, f"`{value}`"), text[0].upper() + text[1:], OPTIONS[name])


def test_each_option_is_what_the_code_says():
    assert "\n".join(settings_listed("Option")) == "\n".join(options())
    assert [re.findall(r"`(\w+)`", each)[0] for each in settings_listed("Option")] == list(OPTIONS)
    assert set(OPTIONS) == set(RouteOptions.__annotations__)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_no_page_names_a_setting_or_a_command_that_is_not_there(page):
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\bIDEMPOTENCY_[A-Z_]*[A-Z]", text)) <= set(SETTINGS)
    named = re.findall(r"""flask"?,? ["\w, -]*idempotency"?,? "?([a-z-]+)""", text)
    assert set(named) <= set(cli.commands)
