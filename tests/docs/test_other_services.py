"""``docs/other-services.md``: its views are called, and its crashes are made. Charges are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotency import current_operation
from tests.docs.how_to import Page

STEPS = "SELECT step.key FROM idempotency_record, json_each(steps) AS step"


@pytest.fixture
def shop(page, provider) -> Page:
    return page("other-services.md")


def test_a_declined_card_is_stored(shop, provider):
    for provider.refuses in 402, 0:
        assert shop.post("/payments").status_code == 402
    assert provider.ledger == []


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ("", 429),
        ("", 500),
        ("garbles", 503),
        # These say nothing about an earlier call under the same key.
        *(("loses", each) for each in (400, 401, 409, 425)),
    ],
)
def test_a_response_that_leaves_the_charge_open_is_no_failure(shop, provider, first, status):
    if first:  # a call that was charged, and whose response was lost or could not be read
        setattr(provider, first, 1)
        assert shop.post("/payments").status_code == 503
    provider.refuses = status
    assert shop.post("/payments").status_code == 503
    provider.refuses = 0
    assert shop.post("/payments").json == {"charge": "ch_0", "id": 1}
    assert (len(provider.ledger), shop.count("payment")) == (1, 1)


@pytest.mark.parametrize("deduplicates", [True, False], ids=["with", "without"])
@pytest.mark.parametrize(
    ("function", "after", "steps"),
    [
        ("charge_card", False, []),
        ("charge_card", True, []),
        ("save_payment", False, [("charge",)]),
        ("save_payment", True, [("charge",)]),  # of an atomic step: its end is not its commit
    ],
)
def test_the_table_of_crashes(shop, provider, function, after, steps, deduplicates):
    provider.deduplicates = deduplicates
    shop.die("/payments", function, after)
    assert shop.sql(STEPS) == steps
    assert shop.post("/payments").status_code == 201
    twice = function == "charge_card" and after and not deduplicates
    assert (len(provider.ledger), shop.count("payment")) == (2 if twice else 1, 1)


@pytest.mark.parametrize(("after", "charging"), [(False, [2]), (True, [1])])
def test_after_a_crash_the_provider_is_asked_what_it_did(shop, provider, after, charging):
    attempts, charge = [], shop.names["charge_card"]
    shop.names["charge_card"] = lambda *args: (
        attempts.append(current_operation.attempt) or charge(*args)
    )
    shop.die("/transfers", "charge_card", after)
    assert [shop.post("/transfers").json for _ in range(2)] == [{"id": 1, "transfer": "ch_0"}] * 2
    assert (attempts, len(provider.ledger), shop.count("payment")) == (charging, 1, 1)


def test_a_call_without_a_response_is_asked_about_too(shop, provider):
    provider.deduplicates, provider.loses = False, 1
    for problem in "try-again", "request-in-progress":
        assert shop.post("/transfers").json["type"].endswith(problem)
    shop.end_leases()
    assert shop.post("/transfers").json == {"id": 1, "transfer": "ch_0"}
    assert (len(provider.ledger), shop.count("payment")) == (1, 1)


def test_a_view_that_does_not_know_leaves_the_operation_to_an_operator(shop):
    real = shop.names["requests"]

    def post(*_args: Any, **_options: Any) -> Any:
        raise real.ReadTimeout

    shop.names["requests"] = SimpleNamespace(**{**vars(real), "post": post})
    for _ in range(2):
        assert shop.post("/bookings").json["type"].endswith("operation-interrupted")
    digits = shop.run_command("list", "--state", "interrupted").splitlines()[1].split()[0]
    shop.names["requests"] = real
    assert shop.run_command("release", "--why=asked", digits).startswith(f"{digits}: may be run again")
    assert shop.post("/bookings").status_code == 201
