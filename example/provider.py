"""The client of the card provider, which charges once for each of our keys."""

from typing import Any

import requests
from flask import current_app

from flask_idempotency import OperationInterrupted

SECONDS = 10  # it takes one; one that is silent for longer is asked again by the client's retry


def charge(amount: int, reference: str, key: str | None, *, card: str) -> dict[str, Any] | None:
    """Charge a card, in cents. Returns the charge, or None if the card was declined.

    Raises ``OperationInterrupted`` if nobody knows what became of it: a retry sends the same key again.
    """
    try:
        response = requests.post(
            current_app.config["PROVIDER_URL"] + "/charges",
            json={"amount": amount, "reference": reference, "card": card},
            headers={"Idempotency-Key": key} if key else {},
            timeout=SECONDS,
        )
        if response.status_code == 402:
            return None  # a result like any other: recorded, and not asked for again
        response.raise_for_status()
        return {"id": response.json()["id"]}
    except (requests.RequestException, LookupError, TypeError) as error:  # something may be charged
        raise OperationInterrupted("The card provider does not say.", retry_after=5) from error
