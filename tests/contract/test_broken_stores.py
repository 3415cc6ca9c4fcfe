"""The contract catches what it is for: stores that break a guarantee fail it, each where it should."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.of_tests

ROOT = Path(__file__).parents[2]
STORES = Path(__file__).parent / "broken_stores.py"

AFRESH = "an_operation_begins_afresh_no_later_than_its_claim_allows"
LOSES = "an_expired_lease_is_taken_over_and_its_holder_loses"
BOTH = "a_late_holder_and_the_next_attempt_never_both_succeed"

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
    "ForgetsItsTransactionsTakeOver": "an_abandoned_operation_is_taken_over_once[transaction]",
    "KeepsTheRowOfWhatWasAbandoned": "an_abandoned_operation_is_taken_over_once[transaction]",
    "TakesOverWhatIsHeldOnceItsRetentionIsOver": (
        "nobody_takes_over_a_transaction_whose_retention_is_over"
    ),
    "EndsTheLeaseWithAnAbandonedStep": "abandoned_writes_are_gone[step]",
    "ReopensWhatIsFinished": "retention_begins_with_the_response[lease]",
    "ReopensWhatIsReleased": "retention_begins_with_the_release",
    "CountsAttemptsAfreshAfterARelease": "the_next_attempt_has_the_steps_of_those_before[release]",
    "KeepsTheFirstRetentionOfWhatIsReleased": "retention_begins_with_the_release",
    "KeepsTheFirstRetentionOfWhatIsCompleted": "retention_begins_with_the_response[transaction]",
    "ForgetsStepsWithTheRelease": "the_next_attempt_has_the_steps_of_those_before[release]",
    "ForgetsStepsWithTheInterruption": "the_next_attempt_has_the_steps_of_those_before[abandon]",
    "KeepsStepsAsText": "the_next_attempt_has_the_steps_of_those_before[abandon]",
    "RecordsAStepWithoutRenewingTheLease": "recording_a_step_renews_the_lease",
    "RecordsAStepOfWhoWasTakenOver": LOSES,
    "RenewsTheLeaseOfSomebodyElse": LOSES,
    "RenewsFromTheLeasesEnd": "extending_makes_a_lease_longer_and_never_shorter",
    "ShortensALease": "extending_makes_a_lease_longer_and_never_shorter",
    "GivesALeaseToWhatIsFinished": "what_has_ended_gets_no_lease_again[complete]",
    "GivesALeaseToWhatIsReleased": "what_has_ended_gets_no_lease_again[release]",
    "LosesALeaseThatNobodyTook": "an_expired_lease_is_its_holders_until_somebody_takes_over",
    "RaisesWhereItAbandons": LOSES,
    "ReleasesWhatItAbandons": "abandoning_a_lease_ends_it_at_once",
    "WaitsForTheEndOfAnAbandonedLease": "abandoning_a_lease_ends_it_at_once",
    "ExtendsForWhoWasTakenOver": LOSES,
    "RecordsForWhoWasTakenOver": LOSES,
    "CompletesForWhoWasTakenOver": LOSES,
    "ReleasesForWhoWasTakenOver": LOSES,
    "AbandonsForWhoWasTakenOver": LOSES,
    "HasLeasesOfOneLength": "the_first_claim_holds_the_key_alone[lease]",
    "CutsKeys": "keys_that_differ_in_one_byte_are_two",
    "SharesSteps": "keys_that_differ_in_one_byte_are_two",
    "LetsSeveralClaimAtOnce": "one_of_many_concurrent_claims_wins[lease]",
    "LetsSeveralTakeOverAtOnce": "one_of_many_concurrent_take_overs_wins[lease]",
    "TakesOverWhatHasChanged": "an_abandoned_operation_is_taken_over_once[transaction]",
    "TakesOverWhatIsNotThere": "what_is_not_there_is_not_taken_over[lease]",
    "TakesOverFailures": "a_failure_is_stored_as_one",
    "CallsAFailureCompleted": "a_failure_is_stored_as_one",
    "ExpiresWhatIsInterrupted": LOSES,
    "CountsOnAfterTheRetention": "an_expired_operation_begins_afresh[transaction]",
    "KeepsStepsAfterTheRetention": "an_expired_operation_begins_afresh[lease]",
    "KeepsTheFingerprintAfterTheRetention": "an_expired_operation_begins_afresh[transaction]",
    "WaitsOnThoughTheHolderHasEnded": "waiting_ends_when_the_holder_ends[transaction]",
    "DoesNotWaitForTheHolder": "waiting_lasts_as_long_as_the_transaction_or_as_it_may[operation]",
    "WaitsThoughNobodyHolds": "nobody_waits_for_a_record_that_is_not_there",
    "ClaimsWithoutALook": "looking_and_claiming_at_once_does_what_both_do[lease]",
    "LooksAndClaimsAtOnceForSeveral": "looking_and_claiming_at_once_does_what_both_do[lease]",
    "BeginsHoweverLate": "an_operation_begins_no_later_than_its_claim_allows[lease]",
    "BeginsAfreshHoweverLate": f"{AFRESH}[transaction]",
    "RefusesALateClaimToWhatIsThere": "an_operation_begins_no_later_than_its_claim_allows[lease]",
    "InsertsWhatItRefuses": "an_operation_begins_no_later_than_its_claim_allows[lease]",
    "ForgetsTheStepsOfWhatItRefuses": f"{AFRESH}[lease]",
    "ForgetsTheFingerprintWithTheResponse": "a_response_comes_back_as_it_was[lease]",
    "ForgetsTheFingerprintWithAnAtomicResponse": "a_response_comes_back_as_it_was[transaction]",
    "ForgetsTheFingerprintWithTheTransaction": "abandoned_writes_are_gone[operation]",
    "ForgetsTheFingerprintWithAnAtomicStep": (
        "writes_commit_with_the_record_and_not_before[step-sqlalchemy]"
    ),
    "ForgetsTheFingerprintWithAStep": "a_holder_changes_nothing_else[record]",
    "ForgetsTheFingerprintWithARenewal": "a_holder_changes_nothing_else[extend]",
    "ForgetsTheFingerprintWithTheRelease": "a_holder_changes_nothing_else[release]",
    "ForgetsTheFingerprintWithTheInterruption": "a_holder_changes_nothing_else[abandon]",
    "ForgetsTheFingerprintOfAFailure": "a_failure_is_stored_as_one",
    "ForgetsTheFingerprintOfWhatItTakesOver": "an_abandoned_operation_is_taken_over_once[lease]",
    "ForgetsStepsWithARenewal": "a_holder_changes_nothing_else[extend]",
    "FoldsTheNamesOfSteps": "a_holder_changes_nothing_else[record]",
    "ExtendsAfterTheComparison": f"{BOTH}[extend]",
    "RecordsAfterTheComparison": f"{BOTH}[record]",
    "CompletesAfterTheComparison": f"{BOTH}[complete]",
    "ReleasesAfterTheComparison": f"{BOTH}[release]",
    "AbandonsAfterTheComparison": f"{BOTH}[abandon]",
    "TakesOverWhatHasEndedMeanwhile": f"{BOTH}[complete]",
    "BeginsAStepAfterTheComparison": "a_late_step_and_the_next_attempt_never_both_succeed",
    "DoesNotNoticeThatAStepWasRejected": "what_one_holder_does_at_once_is_all_done[record]",
    "DoesNotNoticeThatAResponseWasRejected": "what_one_holder_does_at_once_is_all_done[complete]",
    "DoesNotNoticeThatARenewalWasRejected": "what_one_holder_does_at_once_is_all_done[record]",
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
        timeout=300,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 -- written by pytest
        store = case.get("classname").rpartition(".Test")[2]
        messages = found.setdefault((store, case.get("name").removeprefix("test_")), [])
        messages += [bad.get("message") for bad in case]
    return found


def test_the_store_that_they_are_made_from_passes(said):
    sound = [messages for (store, _), messages in said.items() if store == "Sound"]
    assert len(sound) > 40
    assert not any(sound)


@pytest.mark.parametrize(("store", "name"), CAUGHT.items(), ids=CAUGHT)
def test_a_broken_store_is_caught(said, store, name):
    message = said[store, name][0]
    known = r"AssertionError|assert |Failed: DID NOT RAISE|\S+LeaseLost"
    assert re.match(known, message), message


def test_each_of_them_is_looked_at():
    stores = re.findall(r"(?m)^class Test(\w+)", STORES.read_text(encoding="utf-8"))
    assert sorted(stores) == sorted(["Sound", *CAUGHT])
