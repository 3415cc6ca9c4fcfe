"""What Sentry is told: errors and what needs a person, not refusals; and no secret."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, blocks

CANARY = "canary"
[SETTINGS] = [
    block for block in blocks(ROOT / "docs/monitoring.md", "python") if "sentry" in block.text
]


@pytest.fixture(scope="module")
def told(postgres):
    """The events for each situation: by default, and with the settings of the page."""

    def tell(name, code):
        module = [sys.executable, "-m", "tests.integration.apps.reported"]
        command = [*module, postgres.database(name), code]
        done = subprocess.run(
            command, cwd=ROOT, input=CANARY, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    default = tell("sentry", "sentry_sdk.init('http://public@localhost/1')")
    return default, tell("sentry_page", SETTINGS.text)


def titles(event):
    """What makes an issue of its own: the template of a line of the log, or the class of an error."""
    if "logentry" in event:
        return event["logentry"]["message"]
    return event["exception"]["values"][-1]["type"]


REPORTED = {
    "a replay": [],
    "no key": [],
    "a reused key": [],
    "an error of a view": ["LookupError"],
    "an error of a leased view": ["LookupError", "operation %s failed: %s"],
    "an interruption": ["operation %s interrupted: %s", "Killed"],
    "a database that is lost": ["operation %s: the store is unavailable: %r"],
    "an operation that is not atomic": ["operation %s: %s", "NotAtomic"],
    "a response that is not JSON": ["TypeError"],
    "an error of a job": ["LookupError"],
    "a job whose key is reused": ["KeyReused"],
}


def test_only_errors_and_what_needs_a_person_are_reported_and_as_on_the_page_no_secret(told):
    """With the settings of the page no report holds a key, a scope or a body."""
    default, as_on_the_page = ({name: [*map(titles, of)] for name, of in each.items()} for each in told)
    assert default == REPORTED
    assert as_on_the_page == {**REPORTED, "a job whose key is reused": []}
    default, as_on_the_page = map(json.dumps, told)
    assert CANARY in default
    assert CANARY not in as_on_the_page
