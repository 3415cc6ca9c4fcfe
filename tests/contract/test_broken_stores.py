"""The contract catches what it is for: stores that break a guarantee fail it, each where it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
STORES = Path(__file__).parent / "broken_stores.py"

CAUGHT = {
    "AnswersWithoutWrites": "writes_commit_with_the_record_and_not_before[operation-sqlalchemy]",
    "RecordsStepsWithoutWrites": "writes_commit_with_the_record_and_not_before[step-sqlalchemy]",
    "StoresTheAnswerFirst": "nothing_is_left_when_the_connection_ends[operation]",
    "CommitsEachWrite": "writes_commit_with_the_record_and_not_before[operation-sqlalchemy]",
    "CommitsWhatIsAbandoned": "abandoned_writes_are_gone[operation]",
    "LetsALateAttemptFinish": "an_attempt_that_was_taken_over_writes_nothing[operation]",
    "LetsTheViewEndTheTransaction": "a_transaction_that_the_view_ended_cannot_be_finished[operation]",
    "TakesEveryErrorForItsOwn": "an_ordinary_error_is_not_explained[operation]",
    "KeepsConnections": "connections_are_returned[operation]",
    "DoesNotLockTheRecordForAStep": "nobody_takes_over_during_a_step",
    "BeginsAStepForWhoWasTakenOver": "an_attempt_that_was_taken_over_opens_no_step",
    "DoesNotRenewTheLease": "a_step_renews_the_lease",
    "ResumesWhatHasExpired": "resuming_begins_nothing_afresh[lease]",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What each test said that failed, by store and name: all of the sound one's, one of each other."""
    report = tmp_path_factory.mktemp("broken") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    chosen = [f"{STORES}::Test{store}::test_{name}" for store, name in CAUGHT.items()]
    done = subprocess.run(
        [*command, f"{STORES}::TestSound", *chosen],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 -- written by pytest
        store = case.get("classname").rpartition(".Test")[2]
        found[store, case.get("name").removeprefix("test_")] = [bad.get("message") for bad in case]
    return found


def test_the_store_that_they_are_made_from_passes(said):
    sound = [messages for (store, _), messages in said.items() if store == "Sound"]
    assert len(sound) > 40
    assert not any(sound)


@pytest.mark.parametrize(("store", "name"), CAUGHT.items(), ids=CAUGHT)
def test_a_broken_store_is_caught(said, store, name):
    (message,) = said[store, name]
    assert re.match("AssertionError|assert |Failed: DID NOT RAISE", message), "for another reason"


def test_each_of_them_is_looked_at():
    stores = re.findall(r"(?m)^class Test(\w+)", STORES.read_text(encoding="utf-8"))
    assert sorted(stores) == sorted(["Sound", *CAUGHT])
