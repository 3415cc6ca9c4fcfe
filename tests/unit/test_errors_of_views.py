"""What becomes of an operation that is not atomic, by the error that its view raises."""

import pytest

from flask_idempotency import ConfigurationError, KeyReused, Retryable, TransactionConflict
from flask_idempotency.core.errors import LeaseLost, RecordBroken
from flask_idempotency.core.machine import outcome_after


class Stopped(Exception):
    """As RQ stops a job."""

    __module__, __qualname__ = "rq.timeouts", "JobTimeoutException"


class Again(Exception):
    """As Celery runs a job again."""

    __module__, __qualname__ = "celery.exceptions", "Retry"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (LookupError(), None),
        (Stopped(), "interrupted"),
        (Again(), "released"),
        (Retryable(), "released"),
        (TransactionConflict(), "released"),
        (KeyReused(), "interrupted"),
        (LeaseLost(), "interrupted"),
        (ConfigurationError("wrong"), "interrupted"),
        (RecordBroken(), "interrupted"),
    ],
)
def test_an_error_fails_the_operation_or_says_more(error, outcome):
    assert outcome_after(error) == outcome
