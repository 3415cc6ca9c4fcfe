"""The client of the card provider, which charges once for each of our keys."""

from typing import Any

import requests
from flask import current_app

from flask_idempotency import OperationInterrupted

SECONDS = 10  # it takes one; one that is silent for longer is asked again by the client's retry

# What says nothing about an earlier call with this key: it may have worked.
OPEN = {401, 403, 408, 409, 425, 429}


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
    except requests.RequestException as error:
        raise OperationInterrupted("The card provider does not answer.", retry_after=5) from error
    if response.status_code == 402:
        return None  # a result like any other: recorded, and not asked for again
    if response.status_code in OPEN or response.status_code >= 500:
        raise OperationInterrupted("The card provider is busy.", retry_after=5)
    response.raise_for_status()  # a mistake of ours: stored as failed
    found: dict[str, Any] = response.json()
    return found
