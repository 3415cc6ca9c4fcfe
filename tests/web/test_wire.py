"""What a client gets besides the rows of the table of responses, which the contract suite shows."""

import pytest
import sqlalchemy as sa
from flask import Response

from flask_idempotency import current_operation, idempotent
from tests.drivers import EACH, own_cursor
from tests.stores import BOTH


def test_the_form_of_a_key_is_checked_before_the_user_and_nobody_gets_a_replay(make_world, add_view):
    users, base = ["", None, None, "alice", None], "https://shop.example/"
    world = make_world(init={"scope": lambda: users.pop(0)}, IDEMPOTENCY_PROBLEM_BASE=base)
    runs = add_view(world)
    for key, status, name in (
        (None, 400, "key-required"),
        ("", 400, "key-malformed"),
        *[("key-1", 401, "scope-unknown")] * 3,
        ("key-1", 201, None),
        ("key-1", 401, "scope-unknown"),
    ):
        response = world.post(key=key)
        assert response.status_code == status
        assert response.json.get("type") == (name and base + name)
    assert (runs, users) == ([1], [])


@pytest.mark.parametrize("atomic", [True, False])
def test_a_replay_may_be_forbidden_and_allowed_again(
    app, world, add_view, assert_problem, assert_replayed, atomic
):
    """Who has changed the request hears of that first. The session has read before, and may again."""
    asked, allowed = [], [True]

    def read():
        world.db.session.scalar(sa.text("select 1"))

    def may_see(operation):
        read()
        asked.append((operation.scope, operation.attempt))
        return allowed[0]

    app.before_request(read)
    runs = add_view(world, atomic=atomic, authorize_replay=may_see)
    first = world.post()
    assert asked == []
    allowed[0] = False
    assert_problem(world.post(), 403, "replay-forbidden")
    assert_problem(world.post(json={"other": "canary"}), 422, "key-reused")
    allowed[0] = True
    assert_replayed(first, world.post())
    assert (runs, asked) == ([1], [("alice", 1)] * 2)


@pytest.mark.parametrize(("most", "is_stored"), [(599, False), (600, True)])
def test_a_response_too_large_to_store_is_sent_once(make_world, assert_problem, most, is_stored):
    world = make_world(IDEMPOTENCY_MAX_RESPONSE_BYTES=most)
    pointers = [
        ("Location", "/payments/1"),
        ("Content-Location", "/payments/1.json"),
        ("Link", '</payments/2>; rel="next"'),
        ("Link", '</help>; rel="help"'),
    ]

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return Response(b"canary" * 100, 201, [*pointers, ("X-Request-Id", "canary")])

    first, again = world.post(), world.post()
    assert (first.status_code, len(first.data), world.count()) == (201, 600, 1)
    if is_stored:
        assert again.data == first.data
        return
    assert_problem(again, 409, "response-not-kept")
    assert [line for line in again.headers if line in pointers] == pointers
    assert world.records()[0].body is None


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
            later.append(background(world.post).result())
        world.db.session.add(world.Payment(amount=attempt))
        world.db.session.commit()
        return {"attempt": attempt}, 201

    assert_problem(world.post(), 409, "request-in-progress", retry=True)
    assert later[0].json == world.post().json == {"attempt": 2}
    assert world.sql("select amount from payment") == [(2,)]
