"""The wire table: what a client is told, and that nothing happened when it was refused."""

import pytest
import sqlalchemy as sa
from flask import Response

from flask_idempotency import current_operation, idempotent
from tests.drivers import EACH, own_cursor
from tests.stores import BOTH

BODY = {"amount": 5, "card": "canary"}
OTHER = {"amount": 6, "card": "canary"}


def post(world, key="canary-1", body=None, **kwargs):
    return world.post(key=key, json=body or BODY, **kwargs)


@pytest.fixture
def nothing_happened():
    def check(world, runs):
        assert runs == []
        assert world.count() == 0
        assert world.records() == []

    return check


def test_a_request_without_a_key_is_refused(world, add_view, assert_problem, nothing_happened):
    runs = add_view(world)
    assert_problem(post(world, key=None), 400, "key-required")
    nothing_happened(world, runs)


def test_nobody_signed_in_has_no_keys_and_gets_no_replay(
    make_world, add_view, assert_problem, nothing_happened
):
    users = [None, "", "alice"]
    world = make_world(init={"scope": lambda: users[0]})
    runs = add_view(world)
    for _ in range(2):
        assert_problem(post(world), 401, "scope-unknown")
        nothing_happened(world, runs)
        users.pop(0)
    assert post(world).status_code == 201
    users[0] = None
    assert_problem(post(world), 401, "scope-unknown")


def test_the_form_of_a_key_is_checked_before_the_user(make_world, add_view, assert_problem):
    world = make_world(init={"scope": lambda: None})
    add_view(world)
    assert_problem(post(world, key=""), 400, "key-malformed")


@BOTH
def test_a_duplicate_is_refused_while_the_first_runs(
    world, add_view, gate, background, assert_problem, assert_replayed
):
    runs = add_view(world, during=gate)
    first = background(post, world)
    gate.wait_until_reached()
    assert_problem(post(world), 409, "request-in-progress", retry=True)
    assert_problem(post(world, body=OTHER), 422, "key-reused")
    gate.open()
    assert_replayed(first.result(), post(world))
    assert runs == [1]
    assert world.count() == 1


def test_a_replay_may_be_forbidden_and_allowed_again(world, add_view, assert_problem, assert_replayed):
    asked, allowed = [], [True]

    def may_see(operation):
        asked.append((operation.scope, operation.attempt))
        return allowed[0]

    runs = add_view(world, authorize_replay=may_see)
    first = post(world)
    assert asked == []
    allowed[0] = False
    assert_problem(post(world), 403, "replay-forbidden")
    allowed[0] = True
    assert_replayed(first, post(world))
    assert runs == [1]
    assert asked == [("alice", 1)] * 2


@pytest.mark.parametrize("atomic", [True, False])
def test_authorize_replay_may_use_the_session_that_has_read_before_the_view(
    app, world, add_view, atomic
):
    def read(_operation=None):
        seen.append(world.db.session.scalar(sa.text("select 1")))

    seen = []
    app.before_request(read)
    add_view(world, atomic=atomic, authorize_replay=lambda operation: read(operation) or True)
    assert [post(world).status_code for _ in range(2)] == [201, 201]
    assert seen == [1, 1, 1]


def test_a_changed_request_is_told_so_before_its_right_to_a_replay(world, add_view, assert_problem):
    add_view(world, authorize_replay=lambda operation: False)
    assert post(world).status_code == 201
    assert_problem(post(world, body=OTHER), 422, "key-reused")


def test_a_response_too_large_to_store_is_sent_once(make_world, assert_problem):
    world = make_world(IDEMPOTENCY_MAX_RESPONSE_BYTES=100)

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        response = Response(b"canary" * 100, 201)
        response.headers["X-Request-Id"] = "canary"
        response.headers["Location"] = "/payments/1"
        response.headers["Content-Location"] = "/payments/1.json"
        response.headers.add("Link", '</payments/2>; rel="next"')
        response.headers.add("Link", '</help>; rel="help"')
        return response

    first = post(world)
    assert (first.status_code, len(first.data)) == (201, 600)
    for retry in (post(world), post(world)):
        assert_problem(retry, 409, "response-not-kept")
        assert retry.headers["Location"] == "/payments/1"
        assert retry.headers["Content-Location"] == "/payments/1.json"
        assert retry.headers.getlist("Link") == ['</payments/2>; rel="next"', '</help>; rel="help"']
    assert world.count() == 1
    assert world.records()[0].body is None


def test_a_response_just_small_enough_is_stored(make_world, assert_replayed):
    world = make_world(IDEMPOTENCY_MAX_RESPONSE_BYTES=100)

    @world.app.post("/payments")
    @idempotent
    def pay():
        return b"x" * 100

    assert_replayed(post(world), post(world))


@EACH
@BOTH
@pytest.mark.parametrize("begun", ["", "; SAVEPOINT idempotency_first"])
def test_an_attempt_that_was_taken_over_commits_nothing(
    make_world, probing_at_once, background, assert_problem, begun
):
    """Only a view that ends the transaction behind our back can be overtaken while it runs.

    Where it also makes what else would be missed, only the comparison in the last message is left.
    """
    world = make_world()
    later = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        attempt = current_operation.attempt
        if attempt == 1:
            connection = current_operation.connection.connection.driver_connection
            own_cursor(connection).execute(f"ROLLBACK; BEGIN{begun}")
            later.append(background(post, world).result())
        world.db.session.add(world.Payment(amount=attempt))
        world.db.session.commit()
        return {"attempt": attempt}, 201

    assert_problem(post(world), 409, "request-in-progress", retry=True)
    assert later[0].json == {"attempt": 2}
    assert post(world).json == {"attempt": 2}
    assert world.sql("select amount from payment") == [(2,)]


def test_the_type_of_a_problem_begins_as_the_setting_says(make_world, add_view):
    world = make_world(IDEMPOTENCY_PROBLEM_BASE="https://example.com/problems/")
    add_view(world)
    response = world.post(key=None)
    assert response.json["type"] == "https://example.com/problems/key-required"
