"""``after_commit`` in both worlds: in an operation, and where there is none."""

import functools
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
from flask import Flask, abort
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event, text

from flask_idempotency import NotAtomic, after_commit, idempotent

REQUESTS = ["with a key", "without a key", "unprotected"]


def ways(world, function, **options):
    """Call ``function`` in a view, by the names of ``REQUESTS``; return what posts to it."""
    world.app.post("/payments", endpoint="protected")(idempotent(required=False, **options)(function))
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
    assert seen == ["done"]


def leave(world):
    add_payment(world)
    after_commit(lambda: world.app.config["SEEN"].append("pending"))
    abort(409)


def leave_block(world):
    with world.db.session.begin():
        add_payment(world)
        after_commit(lambda: world.app.config["SEEN"].append("begin"))
        abort(409)


def leave_second(world):
    add_payment(world)
    after_commit(lambda: world.app.config["SEEN"].append("first"))
    world.db.session.commit()
    add_payment(world)
    after_commit(lambda: world.app.config["SEEN"].append("second"))
    abort(409)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(
    ("view", "expected"), [(leave, []), (leave_block, []), (leave_second, ["first"])]
)
@pytest.mark.parametrize("way", REQUESTS)
def test_not_for_what_a_stored_rejection_leaves(world, way, view, expected, atomic):
    """A hunter's: a mail went out for a row that the 409 had undone, if the client sent a key."""
    seen = world.app.config["SEEN"] = []

    def pay():
        return view(world)

    assert ways(world, pay, atomic=atomic)(way).status_code == 409
    assert (seen, world.count()) == (expected, len(expected))


@pytest.mark.parametrize("atomic", [True, False])
def test_what_commits_above_the_view(world, atomic):
    seen = []

    @world.app.after_request
    def commit(response):
        world.db.session.commit()
        return response

    def pay():
        add_payment(world)
        after_commit(lambda: seen.append(seen_from_outside(world)))
        return {}, 201

    post = ways(world, pay, atomic=atomic)
    assert [post(way).status_code for way in REQUESTS] == [201] * 3
    assert seen == [[5], [5, 5], [5, 5, 5]]


def test_what_a_run_leaves_to_be_committed(world):
    seen = []

    def work():
        add_payment(world)
        after_commit(lambda: seen.append(seen_from_outside(world)))
        world.db.session.commit()
        seen.append("committed")
        return 1

    with world.app.app_context():
        for atomic in (True, False):
            name = f"work-{atomic}"
            assert world.idempotency.run("a", work, scope="alice", name=name, atomic=atomic) == 1
    assert seen == ["committed", [5], "committed", [5, 5]]


def test_what_was_asked_for_before_a_leased_operation(world):
    """Its commit is a real one, whatever becomes of the operation."""
    seen = []

    @world.app.before_request
    def before():
        add_payment(world)
        after_commit(lambda: seen.append(seen_from_outside(world)))

    def pay():
        world.db.session.commit()
        return {}, 403

    assert ways(world, pay, atomic=False)("with a key").status_code == 403
    assert seen == [[5]]


@pytest.mark.parametrize("inside", [True, False])
def test_what_cannot_be_called(world, inside):
    async def send():
        raise AssertionError

    run = functools.partial(world.idempotency.run, "a", scope="alice", name="n")
    for wrong in (None, send, functools.partial(send)):
        ask = functools.partial(after_commit, wrong)
        with world.app.app_context(), pytest.raises(TypeError, match="after_commit was given"):
            run(ask) if inside else ask()


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


def test_in_a_thread_that_outlives_a_leased_operation_there_is_nothing_to_wait_for(world):
    """The thread has a copy of the context, in which the operation still is the innermost."""
    ended, called, late = threading.Event(), [], []

    def work():
        assert ended.wait(10)
        with world.app.app_context():
            after_commit(lambda: called.append("at once"))

    with ThreadPoolExecutor(1) as pool:

        @world.app.post("/payments")
        @idempotent(atomic=False)
        def pay():
            late.append(pool.submit(copy_context().run, work))
            return {}, 201

        assert world.post().status_code == 201
        assert called == []
        ended.set()
        late[0].result(10)
    assert called == ["at once"]


def test_in_a_thread_that_outlives_an_atomic_operation_it_is_refused(world):
    ended, late = threading.Event(), []

    def work():
        assert ended.wait(10)
        after_commit(pytest.fail)

    with ThreadPoolExecutor(1) as pool:

        @world.app.post("/payments")
        @idempotent
        def pay():
            add_payment(world)
            world.db.session.commit()
            late.append(pool.submit(copy_context().run, work))
            return {}, 201

        assert world.post().status_code == 201
        ended.set()
        with pytest.raises(NotAtomic, match="where the operation has ended"):
            late[0].result(10)


def test_what_was_rolled_back_is_not_kept(world):
    """On a session that lives on, as a command's does."""

    class Call:
        def __call__(self):
            pytest.fail("it was rolled back")

    with world.app.app_context():
        add_payment(world)
        call = Call()
        kept = weakref.ref(call)
        after_commit(call)
        del call
        world.db.session.rollback()
        gc.collect()
        assert kept() is None
        add_payment(world)
        world.db.session.commit()


def test_where_the_extension_is_not_set_up():
    """A module that several programs share: it waits for the session's commit there, too."""
    heard = []
    after_commit(lambda: heard.append("no application"))
    app, db = Flask(__name__), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    db.init_app(app)
    with app.app_context():
        db.session.execute(text("create table one (a int)"))
        db.session.execute(text("insert into one values (1)"))
        after_commit(lambda: heard.append("committed"))
        assert heard == ["no application"]
        db.session.commit()
    assert heard == ["no application", "committed"]
