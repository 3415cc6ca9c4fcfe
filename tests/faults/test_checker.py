"""The checker accepts a good history, and rejects each kind of broken one for the right reason."""

from dataclasses import replace

import pytest

from tests.faults import checker
from tests.faults.checker import emptiness
from tests.faults.history import Death, Error, Fault, History, Kept, Request, Row, Run, Truth
from tests.faults.nemesis import CRASH

pytestmark = pytest.mark.of_tests

QUOTA = {"lock": 1, CRASH: 1}
ALICE, BOB = ("alice", "key"), ("bob", "key")


def good():
    """Alice dies once, retries, meets her duplicate, and is refused another body; Bob just pays."""
    ask = Request(*ALICE, body=0, at=0)
    paid = replace(ask, status=201, answer="A", execution="a2")
    requests = [
        replace(ask, at=1, returned=2),
        replace(ask, at=3, returned=4, status=409),
        replace(paid, at=3, returned=6),
        replace(paid, at=7, returned=8, replayed=True),
        replace(ask, at=7, returned=8, body=1, status=422),
        replace(paid, at=12, returned=13, scope="bob", answer="B", execution="b1"),
        replace(ask, at=14, returned=15, status=503),
        replace(ask, at=19, returned=20, scope="bob", key="poor", status=402, answer="P"),
    ]
    runs = [
        Run(*ALICE, body=0, attempt=1, execution="a1", at=1.5),
        Run(*ALICE, body=0, attempt=2, execution="a2", at=4),
        Run(*BOB, body=0, attempt=1, execution="b1", at=12),
    ]
    history = History(requests, runs, healed=10, ended=20)
    history.deaths.append(Death("lock", *ALICE, at=1.5))
    history.faults.append(Fault(CRASH, 9, 10))
    rows = [Row(*ALICE, body=0, execution="a2"), Row(*BOB, body=0, execution="b1")]
    records = {
        ALICE: Kept(True, 201, "A"),
        BOB: Kept(True, 201, "B"),
        ("bob", "poor"): Kept(True, 402, "P"),
    }
    return history, Truth(rows, records)


def broken_rules(history, truth):
    """Keys settle within 3 s."""
    found = checker.violations(history, truth, longest_view_seconds=1.0)
    return {violation.rule for violation in found}


def test_a_good_history_is_accepted():
    history, truth = good()
    assert broken_rules(history, truth) == set()
    assert emptiness(history, QUOTA) == []


# What breaks a history: functions of the history and the truth.


def change(number, **facts):
    """Request ``number`` with other facts."""

    def broken(history, _truth):
        history.requests[number - 1] = replace(history.requests[number - 1], **facts)

    return broken


def add(**facts):
    """One more request of Alice's, after all the others."""
    request = Request(**{"scope": "alice", "key": "key", "body": 0, "at": 15, "returned": 16, **facts})
    return lambda h, t: h.requests.append(request)


def both(*breaks):
    return lambda h, t: [each(h, t) for each in breaks]


BROKEN = {
    "more than one row": lambda h, t: t.rows.append(replace(t.rows[0], execution="a3")),
    "a row without a completed record": lambda h, t: t.records.update({ALICE: Kept(False)}),
    "a completed record without its row": lambda h, t: t.rows.pop(0),
    "a record of a refusal, with a row": lambda h, t: t.rows.append(Row("bob", "poor", 0, "x")),
    "a 2xx whose row is not there": change(3, execution="a9"),
    "a final answer without a completed record": lambda h, t: t.records.pop(("bob", "poor")),
    "two different final answers": change(4, answer="other"),
    "an answer that is not the record's": lambda h, t: t.records.update(
        {BOB: Kept(True, 201, "other")}
    ),
    "two first answers": change(4, replayed=False),
    "500 after the final answer": add(status=500),
    "422 after the final answer": add(status=422),
    "409 after the final answer": add(scope="bob", status=409),
    "a changed body got a final answer": change(5, status=201, answer="A", execution="a2"),
    "a changed body left a row": lambda h, t: t.rows.append(replace(t.rows[0], body=1)),
    "409 for a changed body after the final answer": add(status=409, body=1),
    "500 for a changed body after the final answer": add(status=500, body=1),
    "422 for a key that nobody owns": add(key="new", status=422),
    "422 for the body that owns the key": change(2, status=422),
    "the view ran for two different bodies": lambda h, t: h.runs.insert(
        1, replace(h.runs[0], body=1, attempt=2, at=2)
    ),
    "two runs with one attempt number": lambda h, t: h.runs.insert(1, replace(h.runs[0], at=2)),
    "no final answer": add(key="new", status=409),
    "no final answer in time": change(6, returned=17),
    "an error: ValueError()": lambda h, t: h.errors.append(Error(*ALICE, "ValueError()", 5)),
    "a transaction was left open": lambda h, t: setattr(t, "left_open", 1),
    # Two scopes that share a record: Bob is given what Alice was, and has no row.
    "a completed record without its row ": both(
        change(6, answer="A", execution="a2", replayed=True), lambda h, t: t.rows.pop(1)
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_history_is_rejected(rule):
    history, truth = good()
    BROKEN[rule](history, truth)
    assert rule.strip() in broken_rules(history, truth)


EMPTY = {
    "only 10% of 41 requests": lambda h, t: h.requests.extend(h.requests[1] for _ in range(33)),
    "lock: 0 of 1": lambda h, t: h.deaths.clear(),
    f"{CRASH}: 0 of 1": lambda h, t: h.faults.clear(),
    "not healthy: {'503': 1}": change(7, at=19),
    "not healthy: no requests": lambda h, t: setattr(h, "ended", 99),
}


@pytest.mark.parametrize("reason", EMPTY)
def test_a_run_that_proves_nothing_is_noticed(reason):
    history, truth = good()
    EMPTY[reason](history, truth)
    assert any(reason in each for each in emptiness(history, QUOTA))
