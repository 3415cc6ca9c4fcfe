"""Frameworks that take over errors: problems and views' errors are those of Flask, or their own.

What becomes of what the view has committed: ``tests/web/test_way_frameworks.py``; Connexion has a file
there, too.
"""

from __future__ import annotations

from types import SimpleNamespace

import flask
import flask_restful
import flask_restx
import pytest
import sqlalchemy as sa
from flask import abort, request
from werkzeug.exceptions import UnprocessableEntity

from flask_idempotency import idempotent

FRAMEWORKS = {"flask": flask, "restful": flask_restful, "restx": flask_restx}

ENDS = "select pg_terminate_backend(pg_backend_pid())"
GIVES_UP = "do $$ begin raise exception using errcode = 'serialization_failure'; end $$"


@pytest.fixture(params=FRAMEWORKS)
def shop(request, make_world):
    """A framework's application, and functions that add a view to it and send a request."""
    package = FRAMEWORKS[request.param]
    world = make_world(IDEMPOTENCY_MAX_RESPONSE_BYTES=1000, PROPAGATE_EXCEPTIONS=False)
    options = {"restx": {"doc": False, "add_specs": False}}.get(request.param, {})
    api = package is not flask and package.Api(world.app, **options)

    def add(name, function, **options):
        for prefix, wrap in ("", idempotent(**options)), ("plain-", lambda view: view):
            path = f"/{prefix}{name}"
            view = wrap(lambda *_resource: function())
            if api:
                kind = type(path[1:], (package.Resource,), {"post": view})
                api.add_resource(kind, path, endpoint=path[1:])
            else:
                world.app.add_url_rule(path, path[1:], view, methods=["POST"])

    return SimpleNamespace(world=world, add=add, post=world.post, package=package)


def test_each_problem_arrives_as_it_is(shop, assert_problem):
    def execute(statement):
        return lambda: shop.world.db.session.execute(sa.text(statement))

    shop.add("payments", lambda: ({}, 201))
    shop.add("reports", lambda: ({"note": "x" * 2000}, 201))
    shop.add("withdrawals", lambda: ({}, 201), authorize_replay=lambda _operation: False)
    shop.add("charges", lambda: ({}, 201), atomic=False)
    shop.add("conflicts", execute(GIVES_UP))
    shop.add("outages", execute(ENDS))
    for name in ("payments", "reports", "withdrawals", "charges"):
        assert shop.post(f"/{name}", name).status_code == 201, name
    assert_problem(shop.post("/payments", None), 400, "key-required")
    assert_problem(shop.post("/payments", "a,b"), 400, "key-malformed")
    assert_problem(shop.post("/payments", "payments", json={}), 422, "key-reused")
    assert_problem(shop.post("/reports", "reports"), 409, "response-not-kept")
    assert_problem(shop.post("/withdrawals", "withdrawals"), 403, "replay-forbidden")
    assert_problem(shop.post("/conflicts", "key"), 503, "transaction-conflict", retry=True)
    assert_problem(shop.post("/outages", "key"), 503, "store-unavailable", retry=True)
    running = (
        "update idempotency_record set state = 'in_progress', completed_at = null,"
        " lease_expires_at = now() + interval '{} hour' where name like '%charges'"
    )
    shop.world.sql(running.format(1))
    assert_problem(shop.post("/charges", "charges"), 409, "request-in-progress", retry=True)
    shop.world.sql(running.format(-1))
    assert_problem(shop.post("/charges", "charges"), 409, "operation-interrupted")


def test_errors_of_views_are_those_of_the_unprotected_view_and_are_stored_by_their_status(shop):
    def invalid():
        """As webargs and flask-smorest raise what marshmallow has found."""
        error = UnprocessableEntity()
        error.data = {"messages": {"json": {"amount": ["Not a number."]}}}
        raise error

    def with_data(status):
        if shop.package is flask_restful:
            flask_restful.abort(status, message="no", code=7)
        if shop.package is flask_restx:
            flask_restx.abort(status, "no", code=7)
        abort(status, "no")

    errors = {f"aborts-{status}": status for status in (400, 401, 409, 422, 500, 503)}
    views = {name: lambda status=status: with_data(status) for name, status in errors.items()}
    views |= {"invalid": invalid, "fails": lambda: 1 / 0, "form": lambda: request.form["missing"]}
    for name, view in views.items():
        shop.add(name, view)
    for name in views:
        plain, first, again = (shop.post(f"/{prefix}{name}", name) for prefix in ("plain-", "", ""))
        is_kept = plain.status_code < 500 and plain.status_code != 401
        assert again.headers.get("Idempotent-Replayed") == ("true" if is_kept else None), name
        for response in first, again:
            assert (response.status_code, response.data) == (plain.status_code, plain.data)
            assert response.content_type == plain.content_type
