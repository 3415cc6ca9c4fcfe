"""Agents for tracing, each in its current release. Not part of ``make test``: run ``make agents``."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.agents.traced import AGENTS
from tests.docs.pages import ROOT

STAYED = [471101, 471103, 471104, 471105, 471106, 471107, 471108]
TENANT = {"tenant": "alice"}
BODY = {**TENANT, "returned": [471104], "count": 5, "amounts": STAYED[:5]}


@pytest.fixture(scope="module", params=[agent.__name__ for agent in AGENTS])
def seen(request, postgres):
    url = postgres.database(f"agent_{request.param}")
    command = [sys.executable, "-m", "tests.agents.traced", request.param, url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_each_view_ran_once_and_each_retry_got_its_response(seen):
    assert seen["runs"] == [1, 1]
    first, retry, leased, again = seen["responses"]
    assert (first, retry) == ([201, None, BODY], [201, "true", BODY])
    assert (leased, again) == ([201, None, TENANT], [201, "true", TENANT])


def test_what_the_views_wrote_is_committed_with_the_records(seen):
    assert seen["amounts"] == STAYED
    assert seen["states"] == ["completed", "completed"]


def test_the_agent_hears_what_the_view_sent(seen):
    assert any("INSERT INTO payment" in text for text in seen["told"])


def test_no_value_reaches_a_trace(seen):
    assert [text for text in seen["told"] if "4711" in text or "alice" in text] == []


def test_nothing_of_ours_is_among_it(seen):
    ours = re.compile(r"txid|idempotency_|'idempotency\.")  # not the names of our modules
    assert [text for text in seen["told"] if ours.search(text)] == []
