"""Frameworks that take over errors: problems and views' errors arrive as they are."""

from functools import partial

import flask_restful
import flask_restx
import pytest
import sqlalchemy as sa
from flask import request
from werkzeug.exceptions import UnprocessableEntity

from flask_idempotency import idempotent

CONFLICT = "do $$ begin raise exception using errcode = 'serialization_failure'; end $$"


@pytest.mark.parametrize("package", [flask_restful, flask_restx])
def test_problems_and_errors_of_views_arrive_as_they_are(make_world, assert_problem, package):
    """Errors are those of the unprotected view, and stored by their status."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    api = package.Api(world.app, **({"doc": False} if package is flask_restx else {}))

    def add(name, function):
        for path, wrap in (name, idempotent), (f"plain-{name}", lambda view: view):
            view = wrap(lambda *_resource: function())
            kind = type(path, (package.Resource,), {"post": view})
            api.add_resource(kind, f"/{path}", endpoint=path)

    def invalid():
        """As webargs and flask-smorest raise what marshmallow has found."""
        error = UnprocessableEntity()
        error.data = {"messages": {"json": {"amount": ["Not a number."]}}}
        raise error

    def refuse(status):
        package.abort(status, message="no", code=7)

    views = {f"aborts-{status}": partial(refuse, status) for status in (401, 409, 503)}
    views |= {"invalid": invalid, "fails": lambda: 1 / 0, "form": lambda: request.form["missing"]}
    conflict = lambda: world.db.session.execute(sa.text(CONFLICT))  # noqa: E731
    for name, view in {**views, "payments": lambda: ({}, 201), "conflicts": conflict}.items():
        add(name, view)

    assert world.post().status_code == 201
    assert_problem(world.post(key=None), 400, "key-required")
    assert_problem(world.post(json={}), 422, "key-reused")
    assert_problem(world.post("/conflicts"), 503, "transaction-conflict", retry=True)
    for name in views:
        plain, first, again = (world.post(f"/{prefix}{name}", name) for prefix in ("plain-", "", ""))
        is_kept = plain.status_code < 500 and plain.status_code != 401
        assert again.headers.get("Idempotent-Replayed") == ("true" if is_kept else None), name
        for response in first, again:
            assert (response.status_code, response.data) == (plain.status_code, plain.data)
            assert response.content_type == plain.content_type
