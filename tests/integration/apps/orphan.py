"""A worker whose view has forked: the child lives on when the worker is killed.

Both write a line: their number, as JSON. Then they wait for a signal.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.integration.apps import copied_claim
from tests.integration.apps.copied_claim import Payment, db

KEY = {"Idempotency-Key": "key"}


def pay() -> Any:
    db.session.add(Payment())
    db.session.flush()
    os.fork()
    print(os.getpid(), flush=True)
    signal.pause()


def main(route: str) -> None:
    copied_claim.pay = pay
    copied_claim.create_app().test_client().post(route, headers=KEY)
