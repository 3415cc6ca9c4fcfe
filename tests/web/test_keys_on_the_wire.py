"""Keys as clients send them, whose they are and for what; and who gets a replay.

The rows of the table of responses: ``tests/contract/test_responses.py``.
"""

from contextlib import closing
from uuid import UUID

import psycopg2
import pytest
import sqlalchemy as sa
from flask import Response, g, request
from werkzeug.local import LocalProxy

from flask_idempotency import ConfigurationError, IdempotencyError, current_operation, idempotent
from tests.drivers import EACH, own_cursor
from tests.stores import BOTH
from tests.web.conftest import is_replayed

JSON, FORM, MULTIPART = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"


def test_a_malformed_key_never_counts_as_absent(world, add_view, assert_problem):
    """What is malformed: ``tests/unit/test_keys.py``, ``integration/test_requests_over_http.py``."""
    runs = add_view(world, required=False)
    second = {"Idempotency-Key": "canary"}
    for sent in {"key": ""}, {"key": "canary" * 50}, {"key": "canary", "headers": second}:
        assert_problem(world.post(user="", **sent), 400, "key-malformed")
    assert (runs, world.records()) == ([], [])


def test_the_header_the_base_of_problems_and_whether_a_key_is_required_are_settings(
    make_world, add_view, assert_replayed
):
    base = "https://shop.example/"
    world = make_world(
        IDEMPOTENCY_HEADER="X-Request-Token", IDEMPOTENCY_REQUIRED=False, IDEMPOTENCY_PROBLEM_BASE=base
    )
    runs = add_view(world)
    add_view(world, "/refunds", endpoint="refund", required=True)
    assert [world.post(key="canary", user=user).status_code for user in ("alice", "")] == [201, 201]
    assert (runs, world.records()) == ([0, 0], [])
    assert world.post("/refunds", key="canary").json["type"] == base + "key-required"
    sent = {"key": None, "headers": {"x-request-TOKEN": "canary"}}
    assert_replayed(world.post(**sent), world.post(**sent))
    assert runs == [0, 0, 1]


def order(kind, amount=5, **members):
    sent = {"amount": amount, **members}
    return {"json": sent} if kind == JSON else {"data": sent, "content_type": kind}


def test_a_function_before_the_view_may_move_the_key_from_another_header(
    world, add_view, assert_problem, assert_replayed
):
    """As for clients that still send one of the API's own. Its body is compared all the same."""

    @world.app.before_request
    def move():
        request.environ["HTTP_IDEMPOTENCY_KEY"] = request.headers["X-Request-Key"]

    runs, old = add_view(world), {"key": None, "headers": {"X-Request-Key": "key-1"}}
    assert_replayed(world.post(**old), world.post(**old))
    assert_problem(world.post(**old, json={"amount": 6}), 422, "key-reused")
    assert runs == [1]


@pytest.mark.parametrize("kind", [JSON, FORM, MULTIPART])
def test_a_natural_key_may_be_in_the_body(world, add_view, assert_problem, assert_replayed, kind):
    def key():
        return request.get_json()["order"] if kind == JSON else request.form["order"]

    runs = add_view(world, key=key)
    free = add_view(world, "/free", endpoint="free", key=key, required=False)
    sent = order(kind, order="Büro")
    assert_replayed(world.post(key=None, **sent), world.post(key="ignored", **sent))
    assert_problem(world.post(key=None, **order(kind, 6, order="Büro")), 422, "key-reused")
    for lacking in order(kind, order=""), order(kind):
        assert_problem(world.post(key="canary", **lacking), 400, "key-required")
        assert world.post("/free", **lacking).status_code == 201
    assert_problem(world.post(key=None, user="", **order(kind)), 401, "scope-unknown")
    # What Flask says of a body that has no key stays.
    other, status = (b"order=1", 415) if kind == JSON else (b"{", 400)
    assert world.post(key=None, data=other).status_code == status
    assert (runs, free, len(world.records())) == ([1], [0, 0], 1)


def test_a_natural_key_is_a_text_an_integer_or_a_uuid(world, add_view, assert_problem, assert_replayed):
    wrong = [7.5, True, ["canary"], b"canary", "canary" * 50, 10**5000]
    keys = iter([7, 7, "7 ", UUID(int=7), None, *wrong])
    add_view(world, key=lambda: next(keys))
    assert_replayed(world.post(), world.post())
    assert [world.post().status_code for _ in range(2)] == [201, 201]
    assert len(world.records()) == 3
    assert_problem(world.post(), 400, "key-required")
    for _ in wrong:
        assert_problem(world.post(), 400, "key-malformed")


# Scopes: nobody meets another's operation.


def proxy(scope):
    return LocalProxy(lambda: scope)


APART = [("acme", "eu:42"), ("acme:eu", "42"), ("acme:eu:", "42"), ("acme", ":eu:42")]
SCOPES = [0, 1, "1", -1, 10**30, "one", "Büro", "\ud800", " ", UUID(int=1), str(UUID(int=1))]
NOBODY = None, "", proxy(None), proxy("")
WRONG = True, 1.5, b"1", ["alice"], object()


def test_scopes_that_look_alike_are_apart_and_nobody_has_none(
    make_world, world, add_view, assert_problem
):
    add_view(world)
    assert not [each for each in APART if is_replayed(world.post(user=each[0], key=each[1]))]
    twice = [each for scope in SCOPES for each in (scope, scope)]
    left = [*twice, proxy("one"), *NOBODY, *WRONG]
    typed = make_world(init={"scope": lambda: left.pop(0)}, TESTING=True)
    runs = add_view(typed)
    assert [is_replayed(typed.post()) for _ in twice] == [False, True] * len(SCOPES)
    assert is_replayed(typed.post())
    for _ in NOBODY:
        assert_problem(typed.post(), 401, "scope-unknown")
    for wrong in WRONG:
        with pytest.raises(ConfigurationError, match=f"UUID or None, not {type(wrong).__name__}"):
            typed.post()
    assert (len(runs), len(typed.records()), left) == (len(SCOPES), len(SCOPES), [])


ERRORS = [(lambda: g.user.id, AttributeError), (lambda: request.form["tenant"], 400)]


@pytest.mark.parametrize(("scope", "end"), [*ERRORS, (lambda: 1 // 0, 401)])
def test_errors_of_a_scope_are_the_applications(make_world, add_view, scope, end):
    world = make_world(init={"scope": scope}, PROPAGATE_EXCEPTIONS=True)
    world.app.register_error_handler(ZeroDivisionError, lambda _error: ("sign in", 401))
    runs = add_view(world)
    if isinstance(end, int):
        assert world.post().status_code == end
    else:
        with pytest.raises(end):
            world.post()
    assert runs == world.records() == []


@pytest.mark.parametrize("init", [{}, {"scope": None}], ids=str)
def test_a_route_may_have_a_scope_of_its_own_or_none(make_world, add_view, init):
    world = make_world(init=init)
    shop = add_view(world, scope=lambda: request.headers.get("X-Shop"))
    everybody = add_view(world, "/all", endpoint="all", **({} if init else {"scope": None}))
    for user in "alice", "bob":
        assert world.post(user=user, headers={"X-Shop": "1"}).status_code == 201
        assert world.post("/all", user=user).status_code == 201
    assert shop == everybody == [1]
    assert world.post().status_code == 401


def test_an_operation_has_a_name_and_a_namespace(world, make_world, add_view, assert_problem):
    """By default the name is the endpoint; with one of its own, renaming a view forgets no keys."""
    add_view(world)
    add_view(world, "/refunds", endpoint="refund")
    add_view(world, "/named", endpoint="one", name="payment")
    add_view(world, "/same", endpoint="two", name="payment")
    add_view(world, "/other", endpoint="three", name="payment", namespace="v2")
    for path in "/payments", "/refunds", "/named", "/other":
        assert [is_replayed(world.post(path)) for _ in range(2)] == [False, True], path
    assert_problem(world.post("/same"), 422, "key-reused")
    uri = world.app.config["SQLALCHEMY_DATABASE_URI"]
    after = make_world(SQLALCHEMY_DATABASE_URI=uri, IDEMPOTENCY_NAMESPACE="v2")
    add_view(after, "/other", endpoint="create_payment", name="payment")
    add_view(after, "/named", endpoint="older", name="payment", namespace="")
    assert is_replayed(after.post("/other"))
    assert is_replayed(after.post("/named"))


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@EACH
def test_keys_and_scopes_are_any_text_and_a_name_that_the_database_cannot_hold_is_refused(
    make_world, postgres, driver, add_view
):
    """Names are stored as they are, the rest is hashed. A step is refused before it runs, too."""
    uri = postgres.database("encoded")
    name = sa.make_url(uri).database
    latin1 = "encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'"
    with closing(psycopg2.connect(postgres.dsn)) as connection:
        connection.autocommit = True
        for statement in f'drop database "{name}"', f'create database "{name}" {latin1}':
            connection.cursor().execute(statement)
    world = make_world(SQLALCHEMY_DATABASE_URI=uri, TESTING=True)
    calls, refused = [], "encoding of the database cannot hold the name '€'"

    def steps():
        with pytest.raises(IdempotencyError, match="a step's name is '€'.*in the encoding"):
            current_operation.step("€", calls.append, 1)
        return current_operation.step("prüfen", lambda: "€"), 201  # which it can hold

    world.app.post("/steps")(idempotent(atomic=False)(steps))
    world.app.post("/named", endpoint="named")(idempotent(name="€")(dict))
    add_view(world, key=lambda: "\ud800\0€", scope=lambda: "€\0\ud800")
    with pytest.raises(ConfigurationError, match=refused):
        world.post("/named")
    with world.app.app_context(), pytest.raises(ConfigurationError, match=refused):
        world.idempotency.run("key-1", calls.append, 1, scope="alice", name="€")
    assert world.records() == calls == []
    assert world.post("/steps").text == world.post("/steps").text == "€"
    assert [is_replayed(world.post()) for _ in range(2)] == [False, True]


# Who gets a replay, and what of it.


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
    assert_problem(world.post(user=""), 401, "scope-unknown")
    allowed[0] = True
    assert_replayed(first, world.post())
    assert (runs, asked) == ([1], [("alice", 1)] * 2)


POINTERS = [
    ("Location", "/payments/1"),
    ("Content-Location", "/payments/1.json"),
    ("Link", '</payments/2>; rel="next"'),
    ("Link", '</help>; rel="help"'),
]


@pytest.mark.parametrize("handled", [False, True])
def test_a_response_too_large_to_store_is_sent_once(make_world, assert_problem, handled):
    world = make_world(IDEMPOTENCY_MAX_RESPONSE_BYTES=599)
    if handled:
        world.app.register_error_handler(IdempotencyError, lambda error: ("ours", error.status))

    @world.app.post("/<int:size>")
    @idempotent
    def pay(size):
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return Response(b"x" * size, 201, [*POINTERS, ("X-Request-Id", "canary")])

    assert [is_replayed(world.post("/599", "short")) for _ in range(2)] == [False, True]
    first, again = world.post("/600"), world.post("/600")
    assert (first.status_code, len(first.data), world.count()) == (201, 600, 2)
    if handled:
        assert (again.status_code, again.text) == (409, "ours")
    else:
        assert_problem(again, 409, "response-not-kept")
    assert [line for line in again.headers if line in POINTERS] == POINTERS
    assert world.records()[1].body is None


@EACH
@BOTH
@pytest.mark.parametrize("begun", ["", "; SAVEPOINT idempotency_first"])
def test_an_attempt_that_was_taken_over_commits_nothing(
    make_world, probing_at_once, background, assert_problem, begun
):
    """Only a view that ends the transaction behind our back can be overtaken while it runs.

    Where it also makes what else would be missed, only the comparison in the last message is left.
    """
    world, later = make_world(), []

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
