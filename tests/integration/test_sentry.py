"""What Sentry is told: errors and what needs a person, not refusals; and no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks

CANARY = "canary"
[SETTINGS] = [
    block for block in blocks(ROOT / "docs/monitoring.md", "python") if "sentry" in block.text
]

Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tell(postgres: Any) -> Callable[[str], Told]:
    def tell(code: str) -> Told:
        url = postgres.database(f"sentry_{len(code)}")
        command = [sys.executable, "-m", "tests.integration.apps.reported", url, code]
        done = subprocess.run(
            command, cwd=ROOT, input=CANARY, capture_output=True, text=True, check=True
        )
        told: Told = json.loads(done.stdout)
        return told

    return tell


@pytest.fixture(scope="module")
def told_by_default(tell: Callable[[str], Told]) -> Told:
    return tell("sentry_sdk.init('http://public@localhost/1')")


@pytest.fixture(scope="module")
def told_as_on_the_page(tell: Callable[[str], Told]) -> Told:
    return tell(SETTINGS.text)


def titles(events: list[dict[str, Any]]) -> list[str]:
    """What makes an issue of its own: the template of a line of the log, or the class of an error."""
    return [
        event["logentry"]["message"]
        if "logentry" in event
        else event["exception"]["values"][-1]["type"]
        for event in events
    ]


def test_only_errors_and_what_needs_a_person_are_reported(told_by_default: Told) -> None:
    assert {situation: titles(events) for situation, events in told_by_default.items() if events} == {
        "an error of a view": ["LookupError"],
        "an error of a leased view": ["LookupError", "operation %s failed: %s"],
        "an interruption": ["operation %s interrupted: %s", "Killed"],
        "a retry of what was interrupted": ["operation %s interrupted: %s"],
        "a database that is lost": ["operation %s: the store is unavailable: %r"],
        "an operation that is not atomic": ["operation %s: %s", "NotAtomic"],
        "an error before a replay": ["LookupError"],
        "an error in the option fingerprint": ["LookupError"],
        "a fingerprint that is not bytes": ["operation %s: %s", "ConfigurationError"],
        "an error in the option store": [
            "LookupError",
            "Request finalizing failed with an error while handling an error",
        ],
        "a response with a wrong header": ["ValueError"],
        "a response of a leased view with a wrong header": ["ValueError", "operation %s failed: %s"],
        "a response that is not JSON": ["TypeError"],
        "an error of a job": ["LookupError"],
        "a result of a job that is not JSON": ["IdempotencyError"],
        "a job whose key is reused": ["KeyReused"],
    }
    silent = {situation for situation, events in told_by_default.items() if not events}
    assert silent == {
        "a replay",
        "no key",
        "a malformed key",
        "a reused key",
        "a replay that is forbidden",
        "a 409 of the view's",
    }


def test_with_the_settings_of_the_page_a_jobs_refusal_is_not_reported(
    told_by_default: Told, told_as_on_the_page: Told
) -> None:
    """Everything else is."""
    expected = {situation: titles(events) for situation, events in told_by_default.items()}
    expected["a job whose key is reused"] = []
    assert expected == {situation: titles(events) for situation, events in told_as_on_the_page.items()}


def test_with_the_settings_of_the_page_no_report_holds_a_key_a_scope_or_a_body(
    told_by_default: Told, told_as_on_the_page: Told
) -> None:
    assert CANARY in json.dumps(told_by_default)
    assert CANARY not in json.dumps(told_as_on_the_page)
