"""``Idempotency.run`` and ``after_commit``: the same guarantee outside of requests."""

import functools
import types
from functools import partial

import pytest
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import (
    ConfigurationError,
    IdempotencyError,
    KeyMalformed,
    KeyReused,
    NotAtomic,
    OperationFailed,
    OperationInterrupted,
    Retryable,
    ScopeUnknown,
    after_commit,
    current_operation,
    idempotent,
    operation_rejected,
)
from flask_idempotency.core.errors import RecordBroken, StepError


@pytest.fixture
def world(make_world, probing_at_once):
    world = make_world()
    with world.app.app_context():
        yield world


@pytest.fixture
def pay(world):
    """A function that writes a payment, commits, and returns its id; counts its runs."""

    def pay(amount=5):
        pay.runs += 1
        payment = world.Payment(amount=amount)
        world.db.session.add(payment)
        world.db.session.commit()
        return {"id": payment.id, "attempt": current_operation.attempt}

    pay.runs = 0
    return pay


@pytest.fixture
def run(world):
    return functools.partial(world.idempotency.run, name="pay", scope="alice")


def test_it_runs_once_and_gives_the_same_result(world, run, pay):
    assert run("key", pay, 7) == {"id": 1, "attempt": 1}
    assert run("key", pay, 7) == {"id": 1, "attempt": 1}
    assert (pay.runs, world.count()) == (1, 1)
    assert world.sql("select amount from payment") == [(7,)]
    assert run("key", pay, scope="bob")["id"] == 2
    assert run("other", pay)["id"] == 3


def test_its_key_is_any_text_of_any_length(run, pay):
    for key in ["Ä 1", "\n", "\ud800", "k" * 10_000]:
        assert run(key, pay) == run(key, pay)
    assert pay.runs == 4


def test_any_json_comes_back(run):
    for result in None, 0, "", [], "text", {"a": [1.5, None]}:
        assert [run(repr(result), lambda result=result: result) for _ in range(2)] == [result] * 2


def test_what_raises_is_rolled_back_and_may_run_again(world, run, pay):
    def fails():
        pay()
        raise LookupError

    with pytest.raises(LookupError):
        run("key", fails)
    assert world.count() == 0
    assert run("key", pay)["attempt"] == 2


@pytest.mark.parametrize("expires", [True, False], ids=["expires", "stays"])
@pytest.mark.parametrize("how", ["flush", "commit"])
def test_what_is_rolled_back_is_not_remembered_by_the_next_job(make_world, expires, how):
    world = make_world(db=SQLAlchemy(session_options={"expire_on_commit": expires}))

    def spend(fails):
        account.amount -= 10
        getattr(world.db.session, how)()
        if fails:
            raise LookupError
        world.db.session.commit()

    with world.app.app_context():
        account = world.Payment(id=1, amount=100)
        world.db.session.add(account)
        world.db.session.commit()
        run = functools.partial(world.idempotency.run, name="spend", scope=None)
        with pytest.raises(LookupError):
            run("a", spend, True)
        run("b", spend, False)
    assert world.sql("select amount from payment") == [(90,)]


def test_what_is_not_json_is_rolled_back(world, run, pay):
    with pytest.raises(IdempotencyError, match="not JSON"):
        run("key", lambda: pay() and object())
    assert world.count() == 0


def test_another_payload_is_another_request(run, pay):
    run("key", pay, payload={"a": 1, "b": [2]})
    run("key", pay, payload={"b": [2], "a": 1})
    with pytest.raises(KeyReused):
        run("key", pay, payload={"a": 1})
    with pytest.raises(KeyReused):
        run("key", pay)
    assert pay.runs == 1


class TestNotAtomic:
    """``run(..., atomic=False)``."""

    def test_an_interrupted_one_is_held_or_found_out(self, world, run):
        def dies():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run("key", dies, atomic=False)
        with pytest.raises(OperationInterrupted):
            run("key", dies, atomic=False)
        found = run("key", dies, atomic=False, on_interrupted=lambda _operation: {"found": True})
        assert found == run("key", dies, atomic=False) == {"found": True}

    def test_who_does_not_know_the_outcome_is_delivered_again(self, run):
        def charge():
            if current_operation.attempt == 1:
                raise OperationInterrupted("The provider is silent.")
            return "charged"

        with pytest.raises(Retryable, match="The outcome is not known yet"):
            run("key", charge, atomic=False, on_interrupted="retry")
        assert run("key", charge, atomic=False, on_interrupted="retry") == "charged"


def test_the_name_is_the_functions(world):
    assert world.idempotency.run("key", named, scope=None) == 1
    assert world.records()[0].name == f"{__name__}.named"
    for nameless in (lambda: 1, functools.partial(named)):
        with pytest.raises(ConfigurationError, match="name="):
            world.idempotency.run("key", nameless, scope=None)


@pytest.mark.parametrize("module", ["__main__", "__mp_main__", "<run_path>", None])
def test_a_function_whose_name_depends_on_the_process_needs_a_name(world, module):
    """The script defines it as __main__.pay; a worker that imports the script knows it as shop.pay."""
    pay = types.FunctionType(named.__code__, {} if module is None else {"__name__": module})
    assert pay.__module__ == module
    with pytest.raises(ConfigurationError, match="(?i)give .*name="):
        world.idempotency.run("key", pay, scope=None)
    assert world.records() == []
    assert world.idempotency.run("key", pay, scope=None, name="shop.pay") == 1


class Shop:
    def method(self):
        return 1

    @classmethod
    def of_the_class(cls):
        return 1

    @staticmethod
    def of_nobody():
        return 1


class Branch(Shop):
    pass


def test_a_function_has_one_name_however_it_is_reached(world):
    """By another name for it, an instance, its class or a subclass, a decorator or a cache."""
    reached = {
        "named": [named, functools.wraps(named)(lambda: 1), functools.lru_cache(named)],
        "Shop.method": [Shop().method, Branch().method],
        "Shop.of_the_class": [Shop.of_the_class, Branch.of_the_class, Shop().of_the_class],
        "Shop.of_nobody": [Shop.of_nobody, Branch().of_nobody],
    }
    for name, functions in reached.items():
        for function in functions:
            world.idempotency.run(name, function, scope=None)
        assert [r.name for r in world.records()][-1] == f"{__name__}.{name}"
    assert len(world.records()) == len(reached)


def named():
    return 1


async def coroutine():
    return 1


def test_wrong_arguments_are_named(world, run):
    with pytest.raises(ConfigurationError, match="needs scope="):
        world.idempotency.run("key", named)
    with pytest.raises(ConfigurationError, match="required is not an option; there are: ttl"):
        run("key", named, required=False)
    with pytest.raises(ConfigurationError, match="payload"):
        run("key", named, payload=object())
    with pytest.raises(ConfigurationError, match="atomic=False"):
        run("key", named, lease=5)
    with pytest.raises(ConfigurationError, match="async def"):
        run("key", coroutine)
    with pytest.raises(ScopeUnknown):
        world.idempotency.run("key", named, scope="")
    for key in ("", None, 5):
        with pytest.raises(KeyMalformed):
            run(key, named)
    assert world.records() == []


def test_an_application_with_one_tenant_needs_no_scope(make_world):
    world = make_world(init={"scope": None})
    with world.app.app_context():
        assert world.idempotency.run("key", named) == 1


def test_a_view_that_asks_for_a_result_again_is_no_replay(app, world, run, pay):
    app.add_url_rule("/plain", "plain", lambda: run("key", pay), methods=["POST"])
    first, second = world.post("/plain"), world.post("/plain")
    assert first.json == second.json
    assert "Cache-Control" not in second.headers
    assert pay.runs == 1


def test_switched_off_it_just_runs(make_world):
    world = make_world(IDEMPOTENCY_ENABLED=False)
    with world.app.app_context():
        runs = []
        for _ in range(2):
            world.idempotency.run("key", lambda: runs.append(1), name="pay", scope=None)
    assert runs == [1, 1]


class TestAfterCommit:
    """``after_commit``."""

    @pytest.mark.parametrize("atomic", [True, False])
    def test_it_runs_once_after_the_commit(self, app, world, atomic, caplog):
        seen = []

        def look():
            seen.append((world.count(), world.records()[0].state))

        @app.post("/payments")
        @idempotent(atomic=atomic)
        def pay():
            world.db.session.add(world.Payment(amount=5))
            world.db.session.commit()
            after_commit(look)
            after_commit(lambda: 1 / 0)
            after_commit(partial(seen.append, "last"))
            assert seen == []
            return {}, 201

        assert [world.post().status_code for _ in range(2)] == [201, 201]
        assert seen == [(1, "completed"), "last"]
        assert "a function failed after the commit" in caplog.text

    @pytest.mark.parametrize("atomic", [True, False])
    def test_what_a_step_registered_goes_with_the_step_that_failed(self, app, world, atomic):
        seen = []

        def step(fails, result=None):
            after_commit(partial(seen.append, f"in a step, fails={fails}"))
            if fails:
                raise LookupError
            return result

        @app.post("/payments")
        @idempotent(atomic=False)
        def pay():
            after_commit(partial(seen.append, "before"))
            for _ in range(2):
                with pytest.raises(LookupError):
                    current_operation.step("pay", step, True, atomic=atomic)
            if atomic:  # otherwise it has run, and is never called again
                with pytest.raises(StepError):
                    current_operation.step("pay", step, False, object(), atomic=True)
            current_operation.step("pay", step, False, atomic=atomic)
            after_commit(partial(seen.append, "after"))
            return {}, 201

        assert world.post().status_code == 201
        assert seen == ["before", "in a step, fails=False", "after"]

    def test_what_a_step_registered_goes_with_a_transaction_that_cannot_commit(self, app, world):
        seen = []

        def step():
            after_commit(partial(seen.append, "in a step"))
            world.db.session.execute(world.db.text("COMMIT"))

        @app.post("/payments")
        @idempotent(atomic=False)
        def pay():
            with pytest.raises(NotAtomic):
                current_operation.step("pay", step, atomic=True)
            return {}, 201

        assert world.post().status_code == 201
        assert seen == []

    @pytest.mark.parametrize("atomic", [True, False])
    def test_not_if_the_view_raises(self, app, world, atomic):
        seen = []

        @app.post("/payments")
        @idempotent(atomic=atomic)
        def pay():
            if not atomic:
                current_operation.step("a", after_commit, partial(seen.append, "in a step"))
            after_commit(partial(seen.append, 1))
            raise LookupError

        app.config["PROPAGATE_EXCEPTIONS"] = False
        assert world.post().status_code == 500
        assert seen == []


def test_run_leaves_nothing_behind_in_the_request_it_is_called_in(make_world):
    world, rejected = make_world(), []

    @world.app.post("/hook")
    def hook():
        run = world.idempotency.run
        run("a", dict, scope="alice", name="pay")
        with pytest.raises(LookupError):
            run("c", lambda: {}["x"], scope="bob", name="pay", atomic=False)
        return {}

    with operation_rejected.connected_to(lambda _app, event: rejected.append(event), world.app):
        answer = world.post("/hook", key=None)
    assert "Cache-Control" not in answer.headers
    assert rejected == []


@pytest.mark.parametrize("body", [b"[" * 200_000 + b"]" * 200_000, b"1" * 5000, b"\xff", b""])
@pytest.mark.parametrize("status", [200, 500])
def test_a_result_that_somebody_else_wrote_is_refused_by_name(world, run, pay, body, status):
    run("key-1", pay)
    world.sql("update idempotency_record set body = :body, status = :status", body=body, status=status)
    with pytest.raises(RecordBroken):
        run("key-1", pay)
    world.sql("update idempotency_record set body = :body, status = 500", body=b"[]")
    with pytest.raises(OperationFailed):
        run("key-1", pay)
    assert pay.runs == 1


def test_a_record_that_cannot_be_read_is_told_as_a_rejection(world, run, pay):
    run("key-1", pay)
    world.sql("update idempotency_record set status = 99")
    problems = []
    note = operation_rejected.connected_to(
        lambda _app, event: problems.append(event.problem), world.app
    )
    with note, pytest.raises(RecordBroken):
        run("key-1", pay)
    assert problems == ["record-unreadable"]
