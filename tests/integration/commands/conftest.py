"""Applications for the tests of the commands: on each store, and on the usual world."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from flask import request

from flask_idempotency import current_operation, idempotent
from tests.integration.commands.running import ANSWER, runner
from tests.integration.commands.shop import Shop


@pytest.fixture(scope="module")
def lasting_shop(
    store: str, tmp_path_factory: Any, redis_server: Any, databases: Any
) -> Iterator[Shop]:
    uri = databases.take() if store == "postgres" else ""
    shop = Shop(store, tmp_path_factory.mktemp("shop"), redis_server.url, uri)
    yield shop
    shop.close()
    if uri:
        databases.give_back(uri)


@pytest.fixture
def shop(lasting_shop: Shop, patient_observing: None) -> Shop:
    """One for each store and all tests of a module, without records."""
    lasting_shop.begin()
    return lasting_shop


@pytest.fixture
def run(world: Any) -> Callable[..., Any]:
    return runner(world.app)


@pytest.fixture
def pay(world: Any) -> Callable[..., Any]:
    """Sends a request to a view that writes one payment: of the operation ``pay``, or ``brief``."""

    def view() -> Any:
        payment = world.Payment(amount=request.get_json()["amount"])
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id, "attempt": current_operation.attempt, "secret": ANSWER}, 201

    for path, endpoint in ("/payments", "pay"), ("/brief", "brief"):
        world.app.post(path, endpoint=endpoint)(idempotent(view))
    return world.post


@pytest.fixture
def stranger(world: Any) -> Iterator[sa.URL]:
    """The world's database for a user without any right in it."""
    role = f"stranger_{secrets.token_hex(4)}"
    world.sql(f"create role {role} login password '{role}'")
    world.sql("revoke create on schema public from public")
    yield sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"]).set(username=role, password=role)
    world.sql(f"drop owned by {role}")
    world.sql(f"drop role {role}")
