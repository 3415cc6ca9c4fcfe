"""``docs/other-services.md`` does what it says: its views are called, and its crashes are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flask_idempotency import OperationInterrupted, current_operation
from tests.docs.how_to import Page
from tests.killed import Killed

END_LEASE = "UPDATE idempotency_record SET lease_expires_at = clock_timestamp()"

OPEN = (400, 401, 403, 404, 408, 409, 422, 425)
"""Statuses that say nothing about an earlier call under the same key."""


@pytest.fixture
def kill() -> Callable[[Page, str], None]:
    """Lets a function of the page die, once, before or after its work; then the lease is over."""

    def kill(shop: Page, path: str, function: str, *, after: bool) -> None:
        whole = shop.names[function]

        def dies(*args: Any) -> None:
            if after:
                whole(*args)
            raise Killed

        shop.names[function] = dies
        with pytest.raises(Killed):
            shop.post(path)
        shop.names[function] = whole
        shop.sql(END_LEASE)

    return kill


class TestCallsToOtherServices:
    @pytest.fixture
    def shop(self, page, provider) -> Page:
        return page("other-services.md")

    def test_a_declined_card_is_stored(self, shop, provider):
        provider.refuses = 402
        assert shop.post("/payments").status_code == 402
        provider.refuses = 0
        assert shop.post("/payments").status_code == 402
        assert provider.ledger == []

    @pytest.mark.parametrize(
        ("first", "status"),
        [("", 429), ("", 500), ("garbles", 503), *(("loses", each) for each in OPEN)],
    )
    def test_a_response_that_leaves_the_charge_open_is_no_failure(self, shop, provider, first, status):
        """Also after a call that was charged, and whose response was lost or could not be read."""
        if first:
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
            ("save_payment", False, ["charge"]),
            ("save_payment", True, ["charge"]),  # of an atomic step: its end is not its commit
        ],
    )
    def test_the_table_of_crashes(self, shop, provider, kill, function, after, steps, deduplicates):
        provider.deduplicates = deduplicates
        kill(shop, "/payments", function, after=after)
        assert [
            name
            for (name,) in shop.sql("SELECT step.key FROM idempotency_record, json_each(steps) AS step")
        ] == steps
        assert shop.post("/payments").status_code == 201
        twice = function == "charge_card" and after and not deduplicates
        assert len(provider.ledger) == (2 if twice else 1)
        assert shop.count("payment") == 1

    @pytest.mark.parametrize(("after", "attempts"), [(False, [2]), (True, [1])])
    def test_the_provider_is_asked_what_it_did(self, shop, provider, kill, after, attempts):
        seen = []
        charge = shop.names["charge_card"]

        def noted(*args):
            seen.append(current_operation.attempt)
            return charge(*args)

        shop.names["charge_card"] = noted
        kill(shop, "/transfers", "charge_card", after=after)
        for _ in range(2):
            assert shop.post("/transfers").json == {"id": 1, "transfer": "ch_0"}
        assert (len(provider.ledger), seen, shop.count("payment")) == (1, attempts, 1)

    def test_a_call_without_a_response_is_asked_about_too(self, shop, provider):
        provider.deduplicates, provider.loses = False, 1
        assert shop.post("/transfers").json["type"].endswith("try-again")
        assert shop.post("/transfers").json["type"].endswith("request-in-progress")
        shop.sql(END_LEASE)
        assert shop.post("/transfers").json == {"id": 1, "transfer": "ch_0"}
        assert (len(provider.ledger), shop.count("payment")) == (1, 1)

    def test_a_view_that_does_not_know_leaves_the_operation_interrupted(self, shop, provider):
        real = shop.names["requests"]
        shop.names["requests"] = _Times(real, real.ReadTimeout)
        for _ in range(2):
            answer = shop.post("/bookings")
            assert (answer.status_code, answer.json["type"].split(":")[-1]) == (
                409,
                OperationInterrupted.type,
            )
        listed = shop.run_command("list", "--state", "interrupted")
        assert "create_booking" in listed
        digits = listed.splitlines()[1].split()[0]
        shop.names["requests"] = real
        assert (
            shop.run_command("release", "--why=asked", digits)
            == f"{digits}: may be run again; until then it is listed as interrupted\n"
        )
        assert shop.post("/bookings").status_code == 201


class _Times:
    """``requests``, whose ``post`` fails as a network may."""

    def __init__(self, module: Any, error: type[Exception]) -> None:
        self._module, self._error = module, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def post(self, *_args: Any, **_options: Any) -> Any:
        raise self._error
