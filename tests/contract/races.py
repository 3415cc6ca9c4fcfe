"""What the tests of a store let happen at once: a holder's verbs, and the next attempt."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import methodcaller

from flask_idempotency.core.errors import LeaseLost
from tests.contract.claims import (
    PATIENCE_SECONDS,
    RESPONSE,
    SHORT_SECONDS,
    a_claim,
    again,
    is_refused,
    lease_left,
    stored_record,
    until,
)

ORDERS = (1, -1) * 5
"""The races of two. Who comes last to the barrier goes on first, so they come in either order."""

RENEWAL = 60.0
VERBS = {
    "extend": methodcaller("extend", RENEWAL),
    "record": methodcaller("record", "mail", b"1"),
    "release": methodcaller("release"),
    "abandon": methodcaller("abandon"),
    "complete": methodcaller("complete", RESPONSE),
}


def finish_a_step(lease):
    """A step, in a transaction of its own."""
    step = lease.open_step()
    try:
        step.record("mail", b"1")
    finally:
        step.abandon()


def at_once(*works):
    """Call them at once; return their results, or the loss of a lease that they raise."""
    barrier = threading.Barrier(len(works))

    def together(work):
        barrier.wait(PATIENCE_SECONDS)
        try:
            return work()
        except LeaseLost as lost:
            return lost

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(together, works))


def race_the_next_attempt(records, verb):
    """Let holders of expired leases do something while others take over: one of the two is told."""
    claims = [a_claim(lease=SHORT_SECONDS / 10) for _ in ORDERS]
    leases = [records.claim(claim) for claim in claims]
    until(lambda: lease_left(records, claims[-1]) <= 0)
    for claim, first, order in zip(claims, leases, ORDERS, strict=True):
        seen, taken = stored_record(records, claim), replace(again(claim), lease_seconds=RENEWAL)
        racers = partial(verb, first), partial(records.take_over, taken, seen)
        late, second = at_once(*racers[::order])[::order]
        record, is_done = stored_record(records, claim), late is None
        lease = first if is_refused(second) else second
        if lease is first:
            assert is_done, "its lease is lost, and nobody has it"
            assert (record.owner, record.attempt) == (claim.owner, 1), "nobody has taken it over"
            assert record.response == (RESPONSE if verb is VERBS["complete"] else None)
            assert verb is not VERBS["extend"] or lease_left(records, claim) > RENEWAL / 2
        else:
            assert not is_done or verb not in (VERBS["complete"], VERBS["extend"]), (
                "both have succeeded"
            )
            assert (record.owner, record.attempt, record.response) == (taken.owner, 2, None)
            left = lease_left(records, claim)
            assert RENEWAL / 2 < left <= RENEWAL, "the lease is not the next one's"
        recorded = is_done and verb in (VERBS["record"], finish_a_step)
        assert lease.steps() == ({"mail": b"1"} if recorded else {})
