"""``after_commit`` in both worlds: in an operation, and where there is none."""

from __future__ import annotations

import pytest
from sqlalchemy import event

from flask_idempotency import after_commit, idempotent

REQUESTS = ["with a key", "without a key", "unprotected"]


def ways(world, function):
    """Call ``function`` in a view, by the names of ``REQUESTS``; return what posts to it."""
    world.app.post("/payments", endpoint="protected")(idempotent(required=False)(function))
    world.app.post("/unprotected", endpoint="unprotected")(function)

    def post(way):
        path = "/unprotected" if way == "unprotected" else "/payments"
        return world.post(path, key="a" if way == "with a key" else None)

    return post


def seen_from_outside(world):
    """The amounts that another connection sees."""
    with world.db.engine.connect() as connection:
        return list(connection.scalars(world.db.select(world.Payment.amount)))


def add_payment(world):
    world.db.session.add(world.Payment(amount=5))


@pytest.mark.parametrize("way", REQUESTS)
def test_it_comes_after_the_commit_that_others_see(world, way):
    seen = []

    def pay():
        add_payment(world)
        after_commit(lambda: seen.append(seen_from_outside(world)))
        world.db.session.flush()
        with world.db.session.begin_nested():
            add_payment(world)
        assert seen == []
        world.db.session.commit()
        return {}, 201

    assert ways(world, pay)(way).status_code == 201
    assert seen == [[5, 5]]


@pytest.mark.parametrize("way", REQUESTS)
def test_a_cache_holds_what_was_committed(world, way):
    """The way of an application that emits an event after its commit, which clears a cache.

    Another request fills the cache from the database, as soon as it is clear.
    """
    world.sql("insert into payment (id, amount) values (7, 1)")
    cache = {7: 1}

    def clear_and_read():
        cache.clear()
        cache[7] = seen_from_outside(world)[0]

    def change():
        payment = world.db.session.get(world.Payment, 7)
        payment.amount = 2
        world.db.session.commit()
        assert payment.amount == 2  # read again, in a transaction that nobody commits
        after_commit(clear_and_read)
        return {}, 201

    assert ways(world, change)(way).status_code == 201
    assert cache == {7: 2}


@pytest.mark.parametrize("way", REQUESTS)
def test_not_for_what_was_rolled_back(world, way):
    seen = []

    def pay():
        add_payment(world)
        world.db.session.flush()
        after_commit(lambda: seen.append("undone"))
        with world.db.session.begin_nested():
            add_payment(world)
        world.db.session.rollback()
        add_payment(world)
        after_commit(lambda: seen.append("done"))
        world.db.session.commit()
        return {}, 201

    assert ways(world, pay)(way).status_code == 201
    # The operation has committed, with both: the page on queues says so.
    assert seen == (["undone", "done"] if way == "with a key" else ["done"])


@pytest.mark.parametrize("way", REQUESTS)
def test_what_it_raises_changes_nothing(world, way, caplog):
    seen = []

    def pay():
        add_payment(world)
        after_commit(lambda: 1 / 0)
        after_commit(lambda: seen.append(world.db.session.get(world.Payment, 1).amount))
        world.db.session.commit()
        return {}, 201

    assert ways(world, pay)(way).status_code == 201
    assert seen == [5]
    assert "a function failed after the commit" in caplog.text
    assert world.count() == 1


def test_a_job_or_a_command(world):
    seen = []
    with world.app.app_context():
        with world.db.session.begin():
            add_payment(world)
            after_commit(lambda: seen.append(seen_from_outside(world)))
            assert seen == []
        after_commit(lambda: seen.append("at once"))
        world.db.session.execute(world.db.text("select 1"))
        after_commit(lambda: seen.append("at once, though it has read"))
    assert seen == [[5], "at once", "at once, though it has read"]


def test_the_end_of_the_context_is_no_commit(world):
    seen = []
    with world.app.app_context():
        add_payment(world)
        after_commit(lambda: seen.append(1))
    with world.app.app_context():
        world.db.session.commit()
    assert seen == []


def test_a_listener_of_the_session_own_event(world):
    """There, outside of an operation, the commit has happened; inside, it has not."""
    seen = []

    def pay():
        session = world.db.session()
        event.listen(
            session,
            "after_commit",
            lambda _: after_commit(lambda: seen.append(seen_from_outside(world))),
        )
        add_payment(world)
        session.commit()
        return {}, 201

    post = ways(world, pay)
    assert [post(way).status_code for way in REQUESTS] == [201] * 3
    assert seen == [[5], [5, 5], [5, 5, 5]]


def test_what_is_added_before_a_view_is_committed_by_its_operation(world):
    """The session's commit in the view is none yet."""
    seen = []

    @world.app.before_request
    def before():
        add_payment(world)
        after_commit(lambda: seen.append(seen_from_outside(world)))

    def pay():
        world.db.session.commit()
        assert seen == []
        return {}, 201

    assert ways(world, pay)("with a key").status_code == 201
    assert seen == [[5]]
