"""Agents for tracing, each in its current release. Not part of ``make test``: run ``make agents``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.agents.traced import AGENTS
from tests.docs.pages import ROOT


@pytest.mark.parametrize("agent", [agent.__name__ for agent in AGENTS])
def test_an_agent_changes_no_response_and_hears_what_the_view_sent_and_nothing_of_ours(agent, postgres):
    command = [sys.executable, "-m", "tests.agents.traced", agent, postgres.database(f"agent_{agent}")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
