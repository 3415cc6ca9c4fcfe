"""OASIS Repeatable Requests 1.0: Committee Specification 01 (7 July 2020), sections 3 and 5.

Read in the text of Committee Specification Draft 02 (19 August 2026), commit 093202af of
oasis-tcs/odata-specs. What the specification leaves open about a request that still runs is as
Microsoft's services do it ("Repeatability of requests", Azure Communication Services).
"""

import datetime as dt

import pytest
from flask import Flask
from werkzeug.http import http_date

import servers
from flask_idempotency import KeyReused, idempotent
from tests.sessions import make_db, protect
from tests.stores import BOTH

ID = "112a3a3e-f94c-4f56-b49b-5aab3d97e5b7"
HEADER, FIRST_SENT = "Repeatability-Request-ID", "Repeatability-First-Sent"
RESULT = "Repeatability-Result"


@pytest.fixture
def world(make_world):
    return make_world(IDEMPOTENCY_PROFILE="repeatable-requests", PROPAGATE_EXCEPTIONS=False)


@pytest.fixture
def send(world):
    """A function that sends a repeatable request; without ``key`` or ``sent``, not with that header."""
    now = http_date()

    def post(path="/payments", key=ID, sent=now, **kwargs):
        headers = {HEADER: key, FIRST_SENT: sent, **kwargs.pop("headers", {})}
        headers = {name: value for name, value in headers.items() if value is not None}
        return world.post(path, key=None, headers=headers, **kwargs)

    return post


def result(response):
    return response.status_code, response.headers.get(RESULT)


def test_5_a_repeated_request_gets_the_same_response(world, add_view, send, assert_replayed):
    runs = add_view(world)
    first, again = send(), send()
    assert_replayed(first, again)
    assert (result(again), len(runs)) == ((201, "accepted"), 1)


def test_3_1_1_the_case_of_an_id_does_not_count(world, add_view, send):
    runs = add_view(world)
    assert [send(key=key).json["run"] for key in (ID, ID.upper(), f'"{ID.upper()}"')] == [1, 1, 1]
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("key", "sent", "type_"),
    [
        (ID, None, "key-malformed"),
        (None, "Tue, 26 Mar 2019 16:06:51 GMT", "key-required"),
        (ID, "", "key-malformed"),
        (ID, "2019-03-26T16:06:51Z", "key-malformed"),
        (ID, "Tuesday, 26-Mar-19 16:06:51 GMT", "key-malformed"),
        (ID, "Tue Mar 26 16:06:51 2019", "key-malformed"),
        (ID, "Tue, 26 Mar 2019 16:06:51 +0000", "key-malformed"),
        (ID, "Mon, 26 Mar 2019 16:06:51 GMT", "key-malformed"),  # it was a Tuesday
        (ID, "Tue, 26 Mar 2019 16:06:51 GMT, Tue, 26 Mar 2019 16:06:51 GMT", "key-malformed"),
        (ID, "Sun, 31 Dec 9999 23:59:59 -2359", "key-malformed"),
        ("a,b", "Tue, 26 Mar 2019 16:06:51 GMT", "key-malformed"),
    ],
)
def test_5_one_header_without_the_other_or_no_date_is_rejected(
    world, add_view, send, assert_problem, key, sent, type_
):
    runs = add_view(world)
    response = send(key=key, sent=sent)
    assert_problem(response, 400, type_)
    assert result(response) == (400, "rejected")
    assert (runs, world.records()) == ([], [])


def test_2_without_both_headers_it_is_no_repeatable_request(world, add_view, send):
    runs = add_view(world)
    for _ in range(2):
        assert result(send(key=None, sent=None)) == (201, None)
    assert (len(runs), world.records()) == (2, [])


def test_a_route_may_require_them(world, add_view, send, assert_problem):
    add_view(world, required=True)
    assert_problem(send(key=None, sent=None), 400, "key-required")


@pytest.mark.parametrize(
    "changed",
    [{"json": {"amount": 6}}, {"path": "/payments?dry=1"}, {"method": "PUT"}],
    ids=["body", "URI", "verb"],
)
def test_5_another_request_with_the_same_id_gets_400(world, add_view, send, assert_problem, changed):
    runs = add_view(world, methods=("POST", "PUT"))
    assert send().status_code == 201
    refused = send(**changed)
    assert_problem(refused, 400, "key-reused")
    assert (result(refused), len(runs)) == ((400, "rejected"), 1)


@pytest.mark.parametrize(
    "changed",
    [{"sent": "Tue, 26 Mar 2019 16:06:51 GMT"}, {"headers": {"Accept-Language": "de"}}],
    ids=["time", "other header"],
)
def test_5_other_headers_are_not_compared_although_they_should_be(world, add_view, send, changed):
    """A SHOULD. A trace's id, a signature or a new token in a retry would make it another request."""
    runs = add_view(world)
    assert send().status_code == 201
    assert (result(send(**changed)), len(runs)) == ((201, "accepted"), 1)


def test_5_what_was_first_sent_before_the_memory_begins_gets_412(world, add_view, send, assert_problem):
    runs = add_view(world)
    long_ago = http_date(dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=3))
    refused = send(sent=long_ago)
    assert_problem(refused, 412, "key-expired")
    assert (result(refused), runs) == ((412, "rejected"), [])


@BOTH
def test_5_while_the_first_request_runs_a_repetition_gets_409(
    world, add_view, send, assert_problem, gate, background
):
    """Accepted: whoever sends it again gets the response. After "rejected", nobody may."""
    add_view(world, during=gate)
    first = background(send)
    gate.wait_until_reached()
    refused = send()
    gate.open()
    assert_problem(refused, 409, "request-in-progress", retry=True)
    assert result(refused) == (409, "accepted")
    assert result(first.result()) == (201, "accepted")


def test_5_after_a_server_error_the_request_may_be_executed_again(world, send):
    runs = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        runs.append(1)
        return ({}, 201) if len(runs) > 1 else 1 / 0

    assert [result(send()) for _ in range(3)] == [
        (500, "accepted"), (201, "accepted"), (201, "accepted"),
    ]  # fmt: skip
    assert len(runs) == 2


def test_3_2_who_is_turned_away_before_anybody_looks_is_told_neither(world, add_view, send):
    """The request may be a repetition of one that ran: after "rejected", it would be sent anew."""
    runs, closed = add_view(world), []
    world.app.before_request(lambda: (closed and ("closed", 403)) or None)
    first = send()
    assert result(send(user="")) == (401, None)
    world.app.config["MAX_CONTENT_LENGTH"] = 1
    assert result(send()) == (413, None)
    world.app.config["MAX_CONTENT_LENGTH"] = None
    closed.append(1)
    assert result(send()) == (403, None)
    closed.clear()
    assert send().data == first.data
    assert len(runs) == 1


def test_3_2_what_ran_without_a_record_is_neither():
    app, db = Flask("shop"), make_db()
    app.config.update(
        SQLALCHEMY_DATABASE_URI=f"postgresql+psycopg2://shop@127.0.0.1:{servers.free_port()}/shop",
        IDEMPOTENCY_PROFILE="repeatable-requests",
        IDEMPOTENCY_ON_STORE_ERROR="allow",
    )
    db.init_app(app)
    protect(app, db, scope=None)
    app.post("/payments")(idempotent(dict))
    headers = {HEADER: ID, FIRST_SENT: http_date()}
    assert result(app.test_client().post("/payments", headers=headers)) == (200, None)


class TestUnprotected:
    """Section 3.1.1: what the server cannot make repeatable, it must not execute."""

    def test_a_view_without_protection_gets_501(self, world, send):
        ran = []
        world.app.post("/plain")(lambda: ran.append(1) or "")
        assert result(send("/plain")) == (501, "rejected")
        assert ran == []
        assert result(send("/plain", key=None, sent=None)) == (200, None)

    def test_get_and_head_ignore_the_headers(self, world, add_view, send):
        add_view(world, methods=("GET", "POST"))
        world.app.get("/plain")(dict)
        for path in "/plain", "/payments":
            assert send(path, method="GET").headers.get(RESULT) is None
        assert result(send("/plain", method="HEAD")) == (200, None)
        assert result(send("/nowhere", method="GET")) == (404, None)

    def test_no_such_page_is_rejected(self, world, send):
        assert result(send("/nowhere")) == (404, "rejected")

    def test_what_is_only_observed_stays_as_it_is(self, world, add_view, send):
        add_view(world, enforce=False)
        assert result(send()) == (201, None)
        assert result(send(key="a,b")) == (201, None)

    def test_where_all_is_only_observed_nothing_is_said(self, make_world, add_view, send):
        world = make_world(IDEMPOTENCY_PROFILE="repeatable-requests", IDEMPOTENCY_ENFORCE=False)
        add_view(world)
        world.app.post("/plain")(dict)
        headers = {HEADER: ID, FIRST_SENT: http_date()}
        for path, status in ("/payments", 201), ("/plain", 200), ("/nowhere", 404):
            assert result(world.post(path, key=None, headers=headers)) == (status, None)

    def test_a_disabled_extension_says_nothing(self, make_world):
        world = make_world(IDEMPOTENCY_PROFILE="repeatable-requests", IDEMPOTENCY_ENABLED=False)
        world.app.post("/plain")(dict)
        response = world.post("/plain", key=None, headers={HEADER: ID})
        assert result(response) == (200, None)


def test_a_handler_of_the_application_sees_the_profiles_status(world, add_view, send):
    add_view(world)
    world.app.register_error_handler(KeyReused, lambda error: ({"own": error.type}, error.status))
    assert send().status_code == 201
    refused = send(json={"amount": 6})
    assert (refused.json, result(refused)) == ({"own": "key-reused"}, (400, "rejected"))
