"""The three requests worth trying in a terminal, against the shop with the extension."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

from example.seed import ALICE


@dataclass(frozen=True)
class Step:
    """One request with the tour's key, and the response to expect."""

    title: str
    amount: int  # cents
    status: int
    replayed: bool
    expect: str

    @property
    def body(self) -> str:
        return json.dumps({"amount": self.amount})

    def headers(self, key: str) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {ALICE.token}",
            "Content-Type": "application/json",
            "Idempotency-Key": key,
        }

    def curl(self, url: str, key: str) -> str:
        """The request as one line for a shell."""
        headers = " ".join(f"-H '{name}: {value}'" for name, value in self.headers(key).items())
        return f"curl -i {url}/payments {headers} -d '{self.body}'"


STEPS = (
    Step("Pay", 12_50, 201, False, "201: the payment is made, 12.50 leaves the account."),
    Step(
        "Retry",
        12_50,
        201,
        True,
        "The same 201, byte for byte, with Idempotent-Replayed: true; nothing is paid again.",
    ),
    Step(
        "Misuse",
        99_00,
        422,
        False,
        "422: the key was used for a different request; a new payment needs a new key.",
    ),
)


def lines(url: str) -> list[tuple[Step, str]]:
    """The three requests, with one key, each with its line for a shell."""
    key = str(uuid.uuid4())
    return [(step, step.curl(url, key)) for step in STEPS]
