"""A view that sends a request to its own application, for an operation that is not atomic.

Up to Flask 3.1 the two share their application context in Flask's test client, and so ``db.session``.
From 3.2 on there is nothing that could be shared, and nothing to refuse.
"""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import NotAtomic, current_operation, idempotent
from tests.flask_releases import BEFORE_3_2

REFUSED, WRITTEN = ((500, 0), ["outer"]) if BEFORE_3_2 else ((201, 1), ["inner", "outer"])
"""What becomes of the inner request where it would share what the outer view has begun."""

OUTER = pytest.mark.parametrize(
    "protect", [idempotent(atomic=False), lambda view: view], ids=["leased", "plain"]
)
"""The kinds of views that may send the inner request."""


@pytest.fixture
def rows(world):
    """The payments, as another connection sees them."""
    return lambda: [note for (note,) in world.sql("select note from payment order by note")]


@pytest.fixture
def add_row(world):
    def add_row(note, *, flush=False):
        world.db.session.add(world.Payment(amount=1, note=note))
        if flush:
            world.db.session.flush()

    return add_row


@pytest.fixture
def add(world):
    """Adds a view whose errors are responses, as in production."""
    world.app.config["PROPAGATE_EXCEPTIONS"] = False

    def add(path, view, protect):
        world.app.add_url_rule(path, path, protect(view), methods=["POST"])

    return add


@pytest.fixture
def inner(world, add, add_row):
    """Sends the inner request. It writes a row and commits; gives its status and how often it ran."""
    runs = []

    def view():
        runs.append(current_operation.name)
        add_row("inner")
        world.db.session.commit()
        return "", 201

    add("/inner", view, idempotent(atomic=False))
    return lambda: (world.post("/inner").status_code, len(runs))


@OUTER
@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "unsaved"])
def test_it_is_refused_where_the_outer_view_holds_changes_and_those_stay(
    world, add, add_row, inner, rows, protect, flush, caplog
):
    def outer():
        add_row("outer", flush=flush)
        assert inner() == REFUSED
        world.db.session.commit()
        return "", 201

    add("/outer", outer, protect)
    assert world.post("/outer").status_code == 201
    assert rows() == WRITTEN
    if BEFORE_3_2:
        error = caplog.records[-1].exc_info[1]
        assert isinstance(error, NotAtomic)
        assert "request to its own application" in str(error)
    assert inner() == (201, 1)
    world.assert_clean()


@OUTER
@pytest.mark.parametrize("status", [201, 503])
def test_beside_a_view_that_has_only_read_it_commits_by_itself(
    world, add, add_row, inner, rows, protect, status
):
    def outer():
        assert world.db.session.scalar(sa.select(sa.func.count(world.Payment.id))) == 0
        assert inner() == (201, 1)
        assert rows() == ["inner"]
        assert world.db.session.scalar(sa.select(sa.func.count(world.Payment.id))) == 1
        add_row("outer")
        world.db.session.commit()
        return "", status

    add("/outer", outer, protect)
    assert world.post("/outer").status_code == status
    assert rows() == ["inner", "outer"]
    assert inner() == (201, 1)
    world.assert_clean()


@OUTER
@pytest.mark.parametrize("end", ["leaves", "raises", "reads"])
def test_what_the_inner_view_leaves_is_not_the_outer_ones(world, add, add_row, rows, protect, end):
    def view():
        if end != "reads":
            add_row("left behind", flush=True)
            add_row("left behind, too")
        if end == "raises":
            raise LookupError
        world.db.session.execute(sa.text("select pg_advisory_xact_lock(1)"))
        return "", 201

    def outer():
        assert world.post("/inner").status_code == (500 if end == "raises" else 201)
        add_row("outer")
        world.db.session.commit()
        return "", 201

    add("/inner", view, idempotent(atomic=False))
    add("/outer", outer, protect)
    assert world.post("/outer").status_code == 201
    assert rows() == ["outer"]
    world.assert_clean()


def test_a_view_in_a_transaction_of_its_own_beginning_keeps_it(world, add, add_row, inner, rows):
    def outer():
        with world.db.session.begin():
            assert inner() == REFUSED
            add_row("outer")
        return "", 201

    add("/outer", outer, idempotent(atomic=False))
    assert world.post("/outer").status_code == 201
    assert rows() == WRITTEN


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("work", ["nothing", "reads", "flushes", "commits"])
def test_an_atomic_view_that_sends_one_is_refused_with_it(
    world, add, add_row, rows, work, atomic, caplog
):
    def outer():
        if work == "reads":
            assert world.db.session.scalar(sa.select(sa.func.count(world.Payment.id))) == 0
        elif work != "nothing":
            add_row("outer", flush=True)
        if work == "commits":
            world.db.session.commit()
        assert world.post("/inner").status_code == 500
        world.db.session.commit()
        return "", 201

    def view():
        add_row("inner")
        world.db.session.commit()
        return "", 201

    add("/inner", view, idempotent(atomic=atomic))
    add("/outer", outer, idempotent)
    assert world.post("/outer").status_code == 500
    assert rows() == []
    error = caplog.records[-1].exc_info[1]
    assert isinstance(error, NotAtomic)
    assert "request to its own application" in str(error)
    assert world.post("/inner").status_code == 201
    world.assert_clean()
