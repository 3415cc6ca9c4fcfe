"""``after_commit`` in both worlds: in an operation, and where there is none."""

import functools
import gc
import weakref
from contextlib import suppress

import pytest
from flask import Flask, abort
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event, text
from werkzeug.exceptions import Conflict

from flask_idempotency import after_commit, current_operation, idempotent

REQUESTS = ["with a key", "without a key", "unprotected"]
KINDS = pytest.mark.parametrize("atomic", [True, False])


@pytest.fixture
def seen():
    return []


@pytest.fixture
def pay(world):
    return lambda: world.db.session.add(world.Payment(amount=5))


@pytest.fixture
def look(world, seen):
    """Notes how many payments another connection sees."""
    return lambda: seen.append(world.count())


def ways(world, function, **options):
    """Call ``function`` in a view, by the names of ``REQUESTS``; return what posts to it."""
    world.app.post("/payments", endpoint="protected")(idempotent(required=False, **options)(function))
    world.app.post("/unprotected", endpoint="unprotected")(function)

    def post(way):
        path = "/unprotected" if way == "unprotected" else "/payments"
        return world.post(path, key="a" if way == "with a key" else None).status_code

    return post


def test_not_for_an_operation_that_failed(world, pay, look, seen):
    """With a lease its rows stay; what was to follow a success is not called."""
    post = ways(
        world, lambda: (pay(), after_commit(look), world.db.session.commit(), 1 // 0), atomic=False
    )
    assert (post("with a key"), seen, world.count()) == (500, [], 1)


@KINDS
def test_one_job_may_begin_the_next(world, pay, atomic):
    def job(number):
        pay()
        world.db.session.commit()
        if number < 3:
            after_commit(lambda: run(number + 1, job, number + 1))

    run = functools.partial(world.idempotency.run, scope=None, name="job", atomic=atomic)
    with world.app.app_context():
        assert [run(1, job, 1) for _ in range(2)] == [None, None]
    assert world.count() == 3


@KINDS
@pytest.mark.parametrize("asks", ["the view", "a listener of the session"])
def test_what_commits_above_the_view(world, pay, look, seen, asks, atomic):
    world.app.after_request(lambda response: world.db.session.commit() or response)

    def view():
        pay()
        if asks == "the view":
            after_commit(look)
        else:  # there, outside of an operation, the commit has happened; inside, it has not
            event.listen(world.db.session(), "after_commit", lambda _: after_commit(look))
        return {}, 201

    post = ways(world, view, atomic=atomic)
    assert [post(way) for way in REQUESTS] == [201] * 3
    assert seen == [1, 2, 3]


@KINDS
@pytest.mark.parametrize("status", [201, 403])
def test_what_was_asked_for_before_the_view(world, pay, look, seen, status, atomic):
    """The view's commit is the operation's, or with a lease a real one, whatever becomes of it."""
    world.app.before_request(lambda: pay() or after_commit(look))

    def view():
        world.db.session.commit()
        assert seen == [] if atomic else seen == [1]
        return {}, status

    assert ways(world, view, atomic=atomic)("with a key") == status
    assert seen == ([] if atomic and status == 403 else [1])


def test_in_a_command(world, pay, look, seen):
    with world.app.app_context():
        with world.db.session.begin():
            pay()
            after_commit(look)
            assert seen == []
        world.db.session.execute(text("select 1"))
        after_commit(look)  # at once, though it has read
        assert seen == [1, 1]
        pay()
        never = functools.partial(pytest.fail, "it was rolled back")
        kept = weakref.ref(never)
        after_commit(never)
        del never
        world.db.session.rollback()
        gc.collect()
        assert kept() is None
        pay()
        after_commit(pytest.fail)
    with world.app.app_context():  # the end of a context is no commit
        world.db.session.commit()


def test_what_cannot_be_called(world):
    async def send():
        raise AssertionError

    for wrong in None, functools.partial(send):
        ask = functools.partial(after_commit, wrong)
        run = functools.partial(world.idempotency.run, "a", ask, scope="alice", name="n")
        for outside_or_inside in ask, run:
            with world.app.app_context(), pytest.raises(TypeError, match="after_commit was given"):
                outside_or_inside()


def test_where_the_extension_is_not_set_up(seen):
    """A module that several programs share: it waits for the session's commit there, too."""
    after_commit(lambda: seen.append("no application"))
    app, db = Flask(__name__), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    db.init_app(app)
    with app.app_context():
        db.session.execute(text("create table one (a int)"))
        db.session.execute(text("insert into one values (1)"))
        after_commit(lambda: seen.append("committed"))
        assert seen == ["no application"]
        db.session.commit()
    assert seen == ["no application", "committed"]


@pytest.fixture
def does(world, seen):
    """Runs a program: parentheses are savepoints, ``!`` undoes one, other words rows that ask.

    What others do not see yet is seen as "too early"; the session can be used, as after any commit.
    """
    session, nested = world.db.session, []

    def is_called(what):
        session.execute(text("select 1"))
        others_see = world.sql("select 1 from payment where note = :note", note=what)
        seen.append(what if others_see or what == "rowless" else "too early")

    def ask(what):
        if what != "rowless":
            session.add(world.Payment(amount=5, note=what))
        after_commit(lambda: is_called(what))

    words = {
        "(": lambda: nested.append(session.begin_nested()),
        ")": lambda: nested.pop().commit(),
        "!": lambda: nested.pop().rollback(),
        "fails": lambda: after_commit(lambda: 1 / 0),  # changes nothing
        "raise": lambda: {}["x"],
        "409": lambda: abort(409),
        **{word: getattr(session, word) for word in ("commit", "flush", "rollback", "connection")},
    }

    def does(program):
        for word in program.split():
            words.get(word, functools.partial(ask, word))()

    return does


def check(world, seen, words):
    """Exactly these were called, each once, and exactly their rows are there."""
    notes = {note for (note,) in world.sql("select note from payment")}
    assert (seen, notes) == (words.split(), {*words.split()} - {"rowless"})
    world.assert_clean()


CALLED = {
    "done fails commit connection rowless": "done rowless",  # at once, though it has read
    # A mail went out for a row that the 409 had undone, if the client sent a key.
    "undone 409": "",
    "done commit undone flush 409": "done",
    "undone flush rollback done commit": "done",
    "before ( undone flush ! after commit": "before after",
    "connection ( rowless ! done commit": "done",
    "( done ) commit": "done",
    "( outer ( undone ! again ) commit": "outer again",
    "( ( undone ) ! done commit": "done",
    "( first ) ( undone ! commit": "first",
    "first commit ( undone ! second commit": "first second",
    "( done commit undone flush rollback commit": "done",  # that ends the savepoint, too
}


@pytest.mark.parametrize("way", [*REQUESTS, "with a key, leased", "in a run"])
@pytest.mark.parametrize(("program", "words"), CALLED.items())
def test_it_comes_after_the_commit_of_what_it_was_asked_in(
    program, words, way, world, does, seen, caplog
):
    if way == "in a run":
        with world.app.app_context(), suppress(Conflict):
            for _ in range(2):
                world.idempotency.run("1", does, program, scope="s", name="job")
        words = "" if "409" in program else words
    else:
        post = ways(world, lambda: does(program) or {}, atomic="leased" not in way)
        for _ in range(2 if "with a key" in way else 1):
            assert post(way.partition(",")[0]) == (409 if "409" in program else 200)
    check(world, seen, words)
    assert ("a function failed after the commit" in caplog.text) == ("fails" in program)


FAILS = "undone flush raise"
STEPS = {
    "a step that fails": ([("one", FAILS)], "done commit", "done"),
    "one that is tried again": ([("one", FAILS), ("one", "done commit")], "", "done"),
    "one that undoes a part": ([("one", "before ( undone ! after commit")], "", "before after"),
    "one after another": ([("one", "done commit"), ("two", FAILS)], "", "done"),
}


@KINDS
@pytest.mark.parametrize(("steps", "after", "words"), STEPS.values(), ids=STEPS)
def test_it_goes_with_the_step_that_failed(steps, after, words, atomic, world, does, seen):
    def view():
        for name, program in steps:
            try:
                current_operation.step(name, does, program, atomic=atomic)
            except LookupError:
                if not atomic:
                    world.db.session.rollback()
        does(after)
        return {}, 201

    post = ways(world, view, atomic=False)
    assert [post("with a key") for _ in range(2)] == [201] * 2
    check(world, seen, words)
