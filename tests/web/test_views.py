"""Every way Flask has to write a view, and what stands above and below ``@idempotent`` in it."""

import asyncio
import functools

import pytest
from flask import Flask, abort, g

from flask_idempotency import ConfigurationError, current_operation, idempotent
from flask_idempotency.core.keys import SHOWN


def awaiting(function):
    """What an async decorator does: here it also notes its event loop."""

    @functools.wraps(function)
    async def inner():
        g.loop = asyncio.get_running_loop()
        return await function()

    return inner


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"enforce": False}], ids=str)
@pytest.mark.parametrize("end", [None, abort, LookupError])
def test_an_async_view_runs_in_the_event_loop_of_what_awaits_it(app, world, options, end):
    """Its errors are handled, and a function after the request may use the session."""
    is_protected, runs, found = options.get("enforce", True), [], []

    @app.errorhandler(LookupError)
    async def handled(_error):
        await asyncio.sleep(0)
        return {}, 410

    @app.after_request
    def read(response):
        found.append(world.db.session.query(world.Payment).count())
        return response

    @idempotent
    async def part():
        return g.loop is asyncio.get_running_loop()

    @app.post("/payments")
    @awaiting
    @idempotent(**options)
    async def payments():
        runs.append(g.loop is asyncio.get_running_loop())
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        if end is abort:
            abort(410)
        if end is not None:
            raise end
        return [await part() if is_protected else True], 201

    first, again = world.post(), world.post()
    assert first.status_code == again.status_code == (410 if end else 201)
    assert first.json == again.json
    assert first.json == [True] or end
    assert (runs, found) == (([True], [1, 1]) if is_protected else ([True] * 2, [1, 2]))
    assert ("Idempotent-Replayed" in again.headers) == is_protected


def guarded(view):
    @functools.wraps(view)
    def inner(*args, **kwargs):
        return view(*args, **kwargs) if g.account_id else abort(401)

    return inner


def test_a_decorator_above_guards_replays_and_one_below_runs_once(app, world):
    protect, runs = idempotent(scope=None), []

    def pay():
        return {"run": runs.append(1)}, 201

    app.post("/above", endpoint="above")(guarded(protect(pay)))
    app.post("/below", endpoint="below")(protect(guarded(pay)))
    for path, status in ("/above", 401), ("/below", 201):
        sent = [{"user": "", "key": "other"}, {}, {}, {"user": ""}]
        assert [world.post(path, **each).status_code for each in sent] == [401, 201, 201, status]
    assert len(runs) == 2


@pytest.mark.parametrize("config", [{}, {"IDEMPOTENCY_ENABLED": False}], ids=["safe", "switched off"])
def test_safe_methods_pass_untouched_and_switched_off_all_do(make_world, config):
    world, operations = make_world(**config), []

    def payments():
        operations.append(bool(current_operation))
        return "", 201

    methods = ["GET", "HEAD", "OPTIONS", *(["POST"] if config else [])]
    world.app.route("/payments", methods=methods)(idempotent(payments))
    for method in methods:
        for key in None, "key-1", "key-1", "mal,formed":
            assert world.post(method=method, key=key, user="").status_code == 201
    assert operations == [False] * 4 * len(methods)
    assert world.records() == []


def test_an_application_without_the_extension_is_told_so():
    app = Flask("forgetful")
    app.testing = True
    app.post("/payments")(idempotent(lambda: "paid"))
    with pytest.raises(ConfigurationError, match=r"idempotency\.init_app\(app, db, scope="):
        app.test_client().post("/payments")


# ``current_operation``.


def test_the_present_operation_knows_what_it_is(app, world, heard):
    @app.post("/payments")
    @idempotent(namespace="v2")
    def pay():
        operation = current_operation
        assert operation.connection.exec_driver_sql("select 7").scalar() == 7
        assert "nary" not in repr(operation)
        for call in (lambda: operation.step("charge", dict)), (lambda: operation.extend(5)):
            with pytest.raises(RuntimeError, match="atomic=False"):
                call()
        return [operation.key, operation.scope, operation.attempt, operation.name, operation.id]

    *known, operation_id = world.post(key='"ca\\"nary"', user="alice").json
    assert known == ['ca"nary', "alice", 1, "pay"]
    assert operation_id == heard[0][1].id == world.records()[0].key.hex()[:SHOWN]


def test_without_an_operation_there_is_none(app, client):
    app.get("/")(lambda: {"there": bool(current_operation)})
    assert client.get("/").json == {"there": False}
    with app.app_context(), pytest.raises(RuntimeError, match="while a view protected by @idempotent"):
        current_operation.attempt  # noqa: B018 -- asking is enough
