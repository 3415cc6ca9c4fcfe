"""An application's own tests, which roll back what they do: the extension works in them as it is."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotency import ConfigurationError, NotAtomic, current_operation, idempotent
from flask_idempotency.testing import assert_idempotent, every_crash
from tests.own_tests.conftest import EACH


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


@EACH
def test_two_tests_know_nothing_of_each_other_nor_does_the_application(shop, recipe, assert_replayed):
    for run in 1, 2:
        with recipe(shop) as connection:
            assert shop.post().json == {"run": run}
            assert amounts(connection) == [5]
        assert (shop.count(), shop.records()) == (0, [])
    first = shop.post()
    assert first.json == {"run": 3}
    assert_replayed(first, shop.post())
    assert (shop.count(), len(shop.records())) == (1, 1)
    with shop.app.app_context():
        assert shop.db.engine.pool.checkedout() == 0


@EACH
def test_several_operations_in_one_test(shop, connection, assert_replayed, assert_problem):
    """Of both kinds, a job first, beside rows that the test has committed: they are not the job's."""
    session, count = shop.db.session, sa.select(sa.func.count(shop.Payment.id))

    def job() -> str:
        session.add(shop.Payment(amount=9))
        session.commit()
        return "done"

    def run() -> str:
        return shop.idempotency.run("job", job, scope=None, name="job")

    begin(connection)
    with shop.app.app_context():
        session.add(shop.Payment(amount=3))
        session.commit()
        assert session.scalar(count) == 1
        assert run() == "done"
    asked = [("/payments", "key-1"), ("/orders", "key-1"), ("/payments", "key-2"), ("/orders", "key-2")]
    first = [shop.post(*each) for each in asked]
    assert shop.post("/plain").status_code == 201
    assert [response.status_code for response in first] == [201] * 4
    for response, each in zip(first, asked, strict=True):
        assert_replayed(response, shop.post(*each))
    assert_problem(shop.post(json={"amount": 6}), 422, "key-reused")
    assert amounts(connection) == [3, 9, 5, 7, 5, 7, 5]
    assert shop.runs == [1, "charge", 1, "charge", 0]
    with shop.app.app_context():
        assert run() == "done"
        assert session.scalar(count) == 7


@EACH
def test_the_kit_finds_one_effect(shop, connection):
    count = lambda: shop.db.session.query(shop.Payment).count()  # noqa: E731
    for path, effects in {"/payments": None, "/orders": count}.items():
        for crash in every_crash(shop.app):
            with crash:
                send = {"json": {"amount": 5}, "headers": {"X-User": "alice"}, "effects": effects}
                assert_idempotent(shop.client, "POST", path, duplicates=0, **send)
    with pytest.raises(ConfigurationError, match="pass duplicates=0"):
        assert_idempotent(shop.client, "POST", "/payments")


@EACH
def test_what_the_view_or_an_error_rolls_back_is_its_own(shop, connection):
    """Behind an operation that stays; after the error the key may try again."""

    def undo() -> None:
        shop.db.session.add(shop.Payment(amount=1))
        shop.db.session.flush()
        shop.db.session.rollback()

    shop.post(key="key-0")
    shop.first, shop.status = undo, 500
    assert shop.post().status_code == 500
    assert amounts(connection) == [5]
    shop.status = 201
    assert shop.post().status_code == 201
    assert (shop.runs, amounts(connection)) == ([1, 1, 2], [5, 5])


@EACH
def test_a_duplicate_and_another_operation_meet_the_first(
    shop, connection, background, gate, assert_problem
):
    """They have no connection but the one that the first request works on."""
    shop.during, shop.app.config["PROPAGATE_EXCEPTIONS"] = gate, True
    first = background(shop.post)
    gate.wait_until_reached()
    assert_problem(shop.post(), 409, "request-in-progress", retry=True)
    assert_problem(shop.post(json={"amount": 6}), 422, "key-reused")
    with pytest.raises(NotAtomic, match="two operations at once"):
        shop.post(key="key-2")
    gate.open()
    assert first.result().status_code == 201
    assert shop.post().headers["Idempotent-Replayed"] == "true"
    assert (shop.runs, amounts(connection)) == ([1], [5])


@EACH
def test_a_table_that_is_missing_is_named(shop, connection):
    begin(connection)
    connection.execute(sa.text("drop table idempotency_record"))
    with pytest.raises(ConfigurationError, match="table idempotency_record"):
        shop.post()


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
