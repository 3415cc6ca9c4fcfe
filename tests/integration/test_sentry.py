"""What Sentry is told: errors and what needs a person, not refusals; and no secret."""

import json
import subprocess
import sys

from tests.docs.pages import ROOT, blocks

CANARY = "canary"
[SETTINGS] = [
    block.text for block in blocks(ROOT / "docs/monitoring.md", "python") if "sentry" in block.text
]
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


def title(event):
    """What makes an issue of its own: the template of a line of the log, or the class of an error."""
    if "logentry" in event:
        return event["logentry"]["message"]
    return event["exception"]["values"][-1]["type"]


def test_only_errors_and_what_needs_a_person_are_reported_and_as_on_the_page_no_secret(postgres):
    """With the settings of the page no report holds a key, a scope or a body."""
    codes = {"sentry": "sentry_sdk.init('http://public@localhost/1')", "sentry_page": SETTINGS}
    module = [sys.executable, "-m", "tests.integration.apps.reported"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [
        subprocess.Popen([*module, postgres.database(name), code], **pipes)
        for name, code in codes.items()
    ]
    default, as_on_the_page = (json.loads(each.communicate(CANARY)[0]) for each in processes)
    reused = "a job whose key is reused"
    for told, reported in (default, REPORTED), (as_on_the_page, {**REPORTED, reused: []}):
        assert {name: [*map(title, events)] for name, events in told.items()} == reported
    assert CANARY in json.dumps(default)
    assert CANARY not in json.dumps(as_on_the_page)
