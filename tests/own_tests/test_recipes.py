"""An application's own tests, which roll back what they do: the extension works in them as it is."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency import ConfigurationError, NotAtomic, current_operation, idempotent
from flask_idempotency.testing import (
    age,
    assert_idempotent,
    assert_idempotent_call,
    crash_at,
    every_crash,
)
from tests.own_tests.conftest import (
    RECIPES,
    engine_replaced,
    savepoint_of_the_session,
    scoped_session_bound,
    with_recipes,
)

EACH = with_recipes(*RECIPES)

TWO = with_recipes(engine_replaced, scoped_session_bound)

ROLLBACKS_LEAVE_IT = with_recipes(
    *(each for each in RECIPES if each not in (engine_replaced, savepoint_of_the_session))
)
"""In the other two a view's rollback() ends the test's transaction, also without the extension."""


@pytest.fixture
def shop(world):
    """One view, protected in two ways and not at all; ``first`` and ``during`` are the test's."""
    world.runs, world.status, world.first, world.during = [], 201, bool, bool

    def write(amount: int) -> None:
        world.db.session.add(world.Payment(amount=amount))

    def pay() -> Any:
        world.runs.append(current_operation.attempt if current_operation else 0)
        world.first()
        write(5)
        world.db.session.commit()
        world.during()
        return {"run": len(world.runs)}, world.status

    def order() -> Any:
        current_operation.step("charge", lambda: world.runs.append("charge"))
        current_operation.step("write", write, 7, atomic=True)
        return {}, world.status

    views = {
        "payments": idempotent(pay),
        "orders": idempotent(atomic=False, on_interrupted="retry")(order),
        "plain": pay,
    }
    for name, view in views.items():
        world.app.add_url_rule(f"/{name}", name, view, methods=["POST"])
    return world


def amounts(connection):
    return list(connection.scalars(sa.text("select amount from payment order by id")))


def begin(connection):
    """On SQLite a test that writes by itself says so, as its driver begins late."""
    if not getattr(connection.connection.driver_connection, "in_transaction", True):
        connection.exec_driver_sql("BEGIN")


def undo(shop):
    """What a view does that changes its mind."""
    shop.db.session.add(shop.Payment(amount=1))
    shop.db.session.flush()
    shop.db.session.rollback()


@EACH
def test_without_the_extension_the_recipe_works(shop, connection):
    begin(connection)
    assert [shop.post("/plain").status_code for _ in range(2)] == [201, 201]
    assert amounts(connection) == [5, 5]


@ROLLBACKS_LEAVE_IT
def test_without_the_extension_a_rollback_leaves_the_rest(shop, connection):
    begin(connection)
    shop.post("/plain")
    shop.first = lambda: undo(shop)
    assert shop.post("/plain").status_code == 201
    assert amounts(connection) == [5, 5]


@EACH
def test_first_request_replay_and_changed_body(shop, connection, assert_replayed, assert_problem):
    first = shop.post()
    assert (first.status_code, first.json) == (201, {"run": 1})
    assert amounts(connection) == [5]
    assert_replayed(first, shop.post())
    assert_problem(shop.post(json={"amount": 6}), 422, "key-reused")
    assert_problem(shop.post(key=None), 400, "key-required")
    assert (shop.runs, amounts(connection)) == ([1], [5])
    states = connection.scalars(sa.text("select state from idempotency_record"))
    assert states.all() == ["completed"]


@EACH
def test_two_tests_one_after_another_know_nothing_of_each_other(shop, recipe):
    for run in 1, 2:
        with recipe(shop) as connection:
            assert shop.post().json == {"run": run}
            assert amounts(connection) == [5]
        assert (shop.count(), shop.records()) == (0, [])


@EACH
def test_then_the_application_works_as_ever(shop, recipe, assert_replayed):
    with recipe(shop):
        shop.post()
    first = shop.post()
    assert first.json == {"run": 2}
    assert_replayed(first, shop.post())
    assert (shop.count(), len(shop.records())) == (1, 1)
    with shop.app.app_context():
        assert shop.db.engine.pool.checkedout() == 0


@EACH
def test_several_operations_in_one_test(shop, connection, assert_replayed):
    """Of both kinds, with a plain request and a job between them, and with rows of the test's own."""
    session = shop.db.session
    begin(connection)
    with shop.app.app_context():
        session.add(shop.Payment(amount=3))
        session.commit()

    def job() -> str:
        shop.db.session.add(shop.Payment(amount=9))
        shop.db.session.commit()
        return "done"

    def run() -> str:
        with shop.app.app_context():
            return shop.idempotency.run("job", job, scope=None, name="job")

    asked = [("/payments", "key-1"), ("/orders", "key-1"), ("/payments", "key-2"), ("/orders", "key-2")]
    first = [shop.post(*each) for each in asked]
    assert (run(), shop.post("/plain").status_code) == ("done", 201)
    assert [response.status_code for response in first] == [201] * 4
    for response, each in zip(first, asked, strict=True):
        assert_replayed(response, shop.post(*each))
    assert run() == "done"
    assert amounts(connection) == [3, 5, 7, 5, 7, 9, 5]
    assert shop.runs == [1, "charge", 1, "charge", 0]
    with shop.app.app_context():
        assert session.scalar(sa.select(sa.func.count(shop.Payment.id))) == 7


@pytest.mark.parametrize("path", ["/payments", "/orders"])
@EACH
def test_the_test_has_used_the_session_before(shop, connection, path, assert_replayed):
    begin(connection)
    shop.db.session.add(shop.Payment(amount=3))
    shop.db.session.commit()
    assert shop.db.session.query(shop.Payment).count() == 1
    first = shop.post(path)
    assert first.status_code == 201
    assert_replayed(first, shop.post(path))
    assert amounts(connection) == [3, 5 if path == "/payments" else 7]


@EACH
def test_a_job_that_is_not_atomic(shop, connection):
    """What it has committed counts as that, and is not taken for changes that it left."""
    begin(connection)

    def job() -> str:
        shop.db.session.add(shop.Payment(amount=9))
        shop.db.session.commit()
        return "done"

    def run() -> str:
        return shop.idempotency.run("job", job, scope=None, name="job", atomic=False)

    assert assert_idempotent_call(shop.app, run, duplicates=0) == "done"
    assert amounts(connection) == [9]


@TWO
def test_what_is_observed_is_rolled_back_too(shop, connection):
    shop.app.extensions["idempotency"].settings = replace(
        shop.app.extensions["idempotency"].settings, enforce=False
    )
    assert [shop.post().status_code for _ in range(2)] == [201, 201]
    assert amounts(connection) == [5, 5]


@TWO
def test_age_and_the_records_grow_old(shop, connection):
    shop.post()
    age(shop.app, timedelta(days=2))
    assert shop.post().json == {"run": 2}


@EACH
def test_the_kit_finds_one_effect(shop, connection):
    count = lambda: shop.db.session.query(shop.Payment).count()  # noqa: E731
    for path, effects in {"/payments": None, "/orders": count}.items():
        for crash in every_crash(shop.app):
            with crash:
                send = {"json": {"amount": 5}, "headers": {"X-User": "alice"}, "effects": effects}
                assert_idempotent(shop.client, "POST", path, duplicates=0, **send)


@TWO
def test_the_kit_finds_a_second_effect(shop, connection):
    """A view that is called again after a crash, and has called its provider each time."""
    shop.first = lambda: shop.charges.append(5)
    shop.charges = []
    send = {"json": {"amount": 5}, "headers": {"X-User": "alice"}}
    with crash_at("before-commit", shop.app), pytest.raises(AssertionError, match="rose by 2, not"):
        assert_idempotent(
            shop.client, "POST", "/payments", duplicates=0, effects=lambda: len(shop.charges), **send
        )


@TWO
def test_duplicates_at_once_are_refused_by_name(shop, connection):
    with pytest.raises(ConfigurationError, match="duplicates=0"):
        assert_idempotent(shop.client, "POST", "/payments", headers={"X-User": "alice"})
    assert shop.runs == []


@TWO
def test_two_operations_at_once_are_refused_by_name(shop, connection, background, gate):
    shop.during, shop.app.config["PROPAGATE_EXCEPTIONS"] = gate, True
    first = background(shop.post)
    gate.wait_until_reached()
    with pytest.raises(NotAtomic, match="two operations at once"):
        shop.post(key="key-2")
    gate.open()
    assert first.result().status_code == 201
    assert amounts(connection) == [5]


@EACH
def test_a_rollback_of_the_view_is_its_own(shop, connection, assert_replayed):
    shop.post(key="key-0")
    shop.first = lambda: undo(shop)
    first = shop.post()
    assert first.status_code == 201
    assert_replayed(first, shop.post())
    assert amounts(connection) == [5, 5]


@EACH
def test_what_is_left_at_the_end_is_not_committed(shop, connection):
    shop.post(key="key-0")
    shop.first, shop.status = lambda: undo(shop), 400
    shop.during = lambda: shop.db.session.add(shop.Payment(amount=1))
    assert shop.post().status_code == 400
    assert amounts(connection) == [5, 5]


@EACH
def test_an_error_undoes_what_the_view_has_committed_and_the_key_may_try_again(shop, connection):
    shop.post(key="key-0")
    shop.status = 500
    assert shop.post().status_code == 500
    assert amounts(connection) == [5]
    shop.status = 201
    assert shop.post().status_code == 201
    assert (shop.runs, amounts(connection)) == ([1, 1, 2], [5, 5])


@EACH
def test_an_error_of_the_database_harms_nobody_else(shop, connection):
    shop.app.config["PROPAGATE_EXCEPTIONS"] = False
    shop.post(key="key-0")
    shop.during = lambda: shop.db.session.execute(sa.text("select nothing"))
    assert shop.post().status_code == 500
    shop.during = bool
    assert shop.post().status_code == 201
    assert amounts(connection) == [5, 5]


@EACH
def test_a_duplicate_meets_the_first_request(shop, connection, background, gate, assert_problem):
    """It has no connection but the one that the first request works on."""
    shop.during = gate
    first = background(shop.post)
    gate.wait_until_reached()
    assert_problem(shop.post(), 409, "request-in-progress", retry=True)
    assert_problem(shop.post(json={"amount": 6}), 422, "key-reused")
    gate.open()
    assert first.result().status_code == 201
    assert shop.post().headers["Idempotent-Replayed"] == "true"
    assert (shop.runs, amounts(connection)) == ([1], [5])


@pytest.mark.parametrize("path", ["/payments", "/orders"])
@EACH
def test_outside_of_tests_it_is_refused_by_name(shop, recipe, path, caplog):
    """A server whose session works in somebody else's transaction would lose what it confirmed."""
    shop.app.testing = False
    shop.app.config["PROPAGATE_EXCEPTIONS"] = True
    with recipe(shop) as connection:
        with (
            caplog.at_level(logging.CRITICAL),
            pytest.raises((ConfigurationError, NotAtomic), match="connection|begin_nested"),
        ):
            shop.post(path)
        assert amounts(connection) == []
    assert shop.count() == 0
    assert "completed" not in [record.state for record in shop.records()]
