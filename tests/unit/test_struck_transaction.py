"""A transaction that an exit has struck before it began, and the next one on its connection."""

import gc
from types import SimpleNamespace

import sqlalchemy as sa

from flask_idempotency.session import transaction
from flask_idempotency.session.transaction import OperationTransaction, transaction_of


def test_the_struck_one_is_forgotten_and_the_next_one_is_not():
    """Else what its session sends would go past the operation, and its commit be a real one."""
    with sa.create_engine("sqlite://").connect() as connection:
        struck = OperationTransaction(connection, SimpleNamespace())
        struck.is_over = True
        found = OperationTransaction(connection, SimpleNamespace())
        del struck
        gc.collect()
        assert transaction_of(connection) is found
        found.is_over = True
        del found
        gc.collect()
        assert id(connection) not in transaction._open
