"""What a client gets besides the rows of the table of responses, which the contract suite shows."""

import pytest
import sqlalchemy as sa
from flask import Response

from flask_idempotency import current_operation, idempotent
from tests.drivers import EACH, own_cursor
from tests.stores import BOTH


def test_what_is_refused_runs_nothing_and_leaves_nothing(make_world, add_view, assert_problem):
    """The form of a key is checked before the user; nobody signed in gets no replay."""
    users = [""]
    world = make_world(
        init={"scope": lambda: users[0]}, IDEMPOTENCY_PROBLEM_BASE="https://shop.example/"
    )
    runs = add_view(world)
    for key, status, name in (
        (None, 400, "key-required"),
        ("", 400, "key-malformed"),
        ("canary", 401, "scope-unknown"),
    ):
        response = world.post(key=key)
        assert response.status_code == status
        assert response.json["type"] == f"https://shop.example/{name}"
        users[0] = None
    assert runs == world.records() == []
    users[0] = "alice"
    assert world.post(key="canary").status_code == 201
    users[0] = None
    assert world.post(key="canary").status_code == 401


def test_a_replay_may_be_forbidden_and_allowed_again(world, add_view, assert_problem, assert_replayed):
    """Who has changed the request hears of that first."""
    asked, allowed = [], [True]

    def may_see(operation):
        asked.append((operation.scope, operation.attempt))
        return allowed[0]

    runs = add_view(world, authorize_replay=may_see)
    first = world.post()
    assert asked == []
    allowed[0] = False
    assert_problem(world.post(), 403, "replay-forbidden")
    assert_problem(world.post(json={"other": "canary"}), 422, "key-reused")
    allowed[0] = True
    assert_replayed(first, world.post())
    assert (runs, asked) == ([1], [("alice", 1)] * 2)


@pytest.mark.parametrize("atomic", [True, False])
def test_authorize_replay_may_use_the_session_that_has_read_before_the_view(
    app, world, add_view, atomic
):
    def read(_operation=None):
        seen.append(world.db.session.scalar(sa.text("select 1")))

    seen = []
    app.before_request(read)
    add_view(world, atomic=atomic, authorize_replay=lambda operation: read(operation) or True)
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert seen == [1, 1, 1]


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
