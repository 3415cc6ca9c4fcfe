"""What a hostile review of operations that are not atomic, and of run(), brought up."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from flask import flash, get_flashed_messages, request

from flask_idempotency import StoreUnavailable, current_operation, idempotent, operation_rejected
from flask_idempotency.cli.resume import resume
from tests.killed import Killed


@pytest.fixture
def world(make_world):
    return make_world(IDEMPOTENCY_PROBE_AFTER=0, PROPAGATE_EXCEPTIONS=False, SECRET_KEY="s")


def add(world, does, path="/payments", **options):
    view = idempotent(atomic=False, **options)(does)
    world.app.add_url_rule(path, does.__name__, view, methods=["POST"])


def fail_a_statement(world):
    with pytest.raises(sa.exc.ProgrammingError):
        world.db.session.execute(sa.text("select * from nowhere"))


def test_a_failed_transaction_in_the_session_does_not_cost_the_answer(world):
    def view():
        fail_a_statement(world)
        return {"done": True}, 201

    add(world, view)
    assert [world.post().status_code for _ in range(2)] == [201, 201]


def test_an_error_that_leaves_the_session_failed_is_kept(world):
    def view():
        world.db.session.execute(sa.text("select * from nowhere"))

    add(world, view)
    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert world.records()[0].state == "failed"


def test_nor_does_it_cost_the_recording_of_a_step(world):
    runs = []

    def charge():
        runs.append(1)
        fail_a_statement(world)

    def view():
        current_operation.step("charge", charge)
        world.db.session.rollback()
        if current_operation.attempt == 1:
            raise Killed
        return {}, 201

    add(world, view, on_interrupted="retry")
    with pytest.raises(Killed):
        world.post()
    assert world.post().status_code == 201
    assert runs == [1]


@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_that_may_be_recorded_is_looked_up_before_it_is_done_again(world, atomic, monkeypatch):
    runs = []

    def view():
        steps = current_operation.steps
        real = steps._lease.open_step if atomic else steps._lease.record

        def answer_lost(*args):
            monkeypatch.undo()
            if not atomic:
                real(*args)
                raise StoreUnavailable
            hold = real()
            record = hold.record

            def lost(*given):
                record(*given)
                raise StoreUnavailable

            hold.record = lost
            return hold

        monkeypatch.setattr(steps._lease, "open_step" if atomic else "record", answer_lost)
        with pytest.raises(StoreUnavailable):
            current_operation.step("charge", runs.append, 1, atomic=atomic)
        current_operation.step("charge", runs.append, 1, atomic=atomic)
        return {}, 201

    add(world, view)
    assert world.post().status_code == 201
    assert runs == [1]


def interrupted(world, path, **options):
    """A view that is killed in each first attempt; the scopes and paths it ran for."""
    runs = []

    def view(**_values):
        runs.append((current_operation.scope, request.path))
        if current_operation.attempt == 1:
            raise Killed
        return {}, 201

    add(world, view, path, resumable=True, on_interrupted="retry", **options)
    return runs


def resume_all(world):
    world.sql("update idempotency_record set created_at = created_at - interval '1 hour',"
              " lease_expires_at = lease_expires_at - interval '1 hour'")  # fmt: skip
    with world.app.app_context():
        state = world.app.extensions["idempotency"]
        given = {"limit": 9, "max_attempts": 9, "backoff_seconds": 0.1}
        return [resumed.status for resumed in resume(state, state.records.admin(), **given)]


def test_resume_runs_nothing_for_somebody_else(make_world):
    world = make_world(init={"scope": lambda: request.headers.get("X-User", "guest")})
    runs = interrupted(world, "/payments")
    with pytest.raises(Killed):
        world.post()
    assert resume_all(world) == [401]
    assert runs == [("alice", "/payments")]


def test_resume_sends_odd_paths_as_they_were(world):
    runs = interrupted(world, "/p/<path:name>", scope=None)
    paths = ("/p/a%3Fb", "/p/%23x", "/p/%2523", "/p/%C3%BC")
    for path in paths:
        with pytest.raises(Killed):
            world.post(path, key=path)
    assert resume_all(world) == [201] * len(paths)
    first, again = runs[: len(paths)], runs[len(paths) :]
    assert sorted(first) == sorted(again)


def test_run_leaves_nothing_behind_in_the_request_it_is_called_in(world):
    rejected = []

    @world.app.post("/hook")
    def hook():
        run = world.idempotency.run
        run("a", lambda: flash("alice has paid"), scope="alice", name="pay")
        run("b", lambda: flash("bob has paid"), scope="bob", name="pay")
        with pytest.raises(LookupError):
            run("c", lambda: {}["x"], scope="bob", name="pay", atomic=False)
        return {}

    @world.app.post("/again")
    def again():
        world.idempotency.run("b", dict, scope="bob", name="pay")
        return {"flashed": get_flashed_messages()}

    with operation_rejected.connected_to(lambda _app, event: rejected.append(event), world.app):
        answer = world.post("/hook", key=None)
    assert "Cache-Control" not in answer.headers
    assert rejected == []
    assert world.post("/again", key=None).json == {"flashed": ["bob has paid"]}


@pytest.mark.parametrize("atomic", [True, False])
def test_what_follows_the_commit_is_no_part_of_the_operation(world, atomic):
    mails = []

    @world.app.post("/payments")
    @idempotent(atomic=atomic)
    def pay():
        world.idempotency.after_commit(
            world.idempotency.run, "mail-1", lambda: mails.append(1), name="mail", scope=None
        )
        return {}, 201

    assert world.post().status_code == 201
    assert mails == [1]


def test_an_async_application_may_find_out_too(world):
    async def find_out(_operation):
        return {"found": True}, 201

    @world.app.post("/payments")
    @idempotent(atomic=False, on_interrupted=find_out)
    async def pay():
        raise Killed

    with pytest.raises(Killed):
        world.post()
    assert world.post().json == {"found": True}
