"""``after_commit`` goes with the savepoint or the step that it was asked for in; else it comes once."""

from __future__ import annotations

import pytest
from sqlalchemy.exc import IntegrityError

from flask_idempotency import after_commit, current_operation, idempotent

REQUESTS = ("with a key", "with a key, leased", "without a key", "unprotected")


class Oops(Exception):
    pass


class Work:
    """What the views below use: rows, savepoints, and what was called after the commit."""

    def __init__(self, world) -> None:
        self.world, self.session, self.called = world, world.db.session, []

    def asks(self, what: str) -> None:
        """Add a row, and ask to be called for it."""
        self.session.add(self.world.Payment(amount=5, note=what))
        after_commit(lambda: self.called.append(what))

    def nested(self):
        return self.session.begin_nested()


def raised_in_it(work):
    work.asks("before")
    try:
        with work.nested():
            work.asks("undone")
            raise Oops
    except Oops:
        work.asks("after")
    work.session.commit()


def raised_in_it_flushed(work):
    work.asks("before")
    try:
        with work.nested():
            work.asks("undone")
            work.session.flush()
            raise Oops
    except Oops:
        work.asks("after")
    work.session.commit()


def rolled_back_by_hand(work):
    nested = work.nested()
    work.asks("undone")
    nested.rollback()
    work.asks("done")
    work.session.commit()


def rolled_back_without_a_row(work):
    work.session.connection()
    nested = work.nested()
    after_commit(lambda: work.called.append("undone"))
    nested.rollback()
    work.asks("done")
    work.session.commit()


def released(work):
    with work.nested():
        work.asks("done")
    work.session.commit()


def released_in_one_that_is_undone(work):
    nested = work.nested()
    with work.nested():
        work.asks("undone")
    nested.rollback()
    work.asks("done")
    work.session.commit()


def undone_in_one_that_is_released(work):
    with work.nested():
        work.asks("outer")
        inner = work.nested()
        work.asks("undone")
        inner.rollback()
        work.asks("outer again")
    work.session.commit()


def nothing_else_written(work):
    nested = work.nested()
    work.asks("undone")
    nested.rollback()
    work.session.commit()


def one_of_two(work):
    with work.nested():
        work.asks("first")
    second = work.nested()
    work.asks("undone")
    second.rollback()
    work.session.commit()


def a_row_that_is_there(work):
    """Insert, or find out that it is there."""
    work.asks("one")
    work.session.flush()
    try:
        with work.nested():
            work.session.add(work.world.Payment(amount=5, note="one"))
            after_commit(lambda: work.called.append("undone"))
            work.session.flush()
    except IntegrityError:
        work.asks("found")
    work.session.commit()


def in_the_second_unit(work):
    work.asks("first")
    work.session.commit()
    nested = work.nested()
    work.asks("undone")
    nested.rollback()
    work.asks("second")
    work.session.commit()


def commit_in_between(work):
    """The session's commit ends the savepoint, too: what is rolled back later was not in it."""
    work.nested()
    work.asks("done")
    work.session.commit()
    work.asks("undone")
    work.session.flush()
    work.session.rollback()
    work.session.commit()


CALLED = {
    raised_in_it: ["before", "after"],
    raised_in_it_flushed: ["before", "after"],
    rolled_back_by_hand: ["done"],
    rolled_back_without_a_row: ["done"],
    released: ["done"],
    released_in_one_that_is_undone: ["done"],
    undone_in_one_that_is_released: ["outer", "outer again"],
    nothing_else_written: [],
    one_of_two: ["first"],
    a_row_that_is_there: ["one", "found"],
    in_the_second_unit: ["first", "second"],
    commit_in_between: ["done"],
}


def expect(work, called):
    """Exactly these were called, each once, and exactly their rows are there."""
    notes = [note for (note,) in work.world.sql("select note from payment order by id")]
    assert (work.called, sorted(notes)) == (called, sorted(called))


@pytest.mark.parametrize("way", REQUESTS)
@pytest.mark.parametrize("do", CALLED)
def test_what_was_asked_in_a_savepoint_goes_with_it(do, way, world):
    work = Work(world)

    def pay():
        do(work)
        return {}, 201

    if way != "unprotected":
        pay = idempotent(required=False, atomic="leased" not in way)(pay)
    world.app.post("/payments")(pay)
    key = "a" if way.startswith("with a key") else None
    for _ in range(2 if key else 1):
        assert world.post(key=key).status_code == 201
    expect(work, CALLED[do])
    world.assert_clean()


def test_a_job_drops_it_too(world):
    work = Work(world)
    for _ in range(2):
        with world.app.app_context():
            world.idempotency.run("1", raised_in_it, work, scope="s", name="job")
    expect(work, CALLED[raised_in_it])


# Steps.


def fails(work):
    work.asks("undone")
    work.session.flush()
    raise Oops


def a_step_that_fails(work, step):
    with pytest.raises(Oops):
        step("one", fails, work)
    work.asks("done")
    work.session.commit()


def a_step_that_fails_and_is_tried_again(work, step):
    with pytest.raises(Oops):
        step("one", fails, work)
    step("one", released, work)


def a_step_that_undoes_a_part(work, step):
    step("one", raised_in_it, work)


def a_step_after_one(work, step):
    step("one", released, work)
    with pytest.raises(Oops):
        step("two", fails, work)


STEPS = {
    a_step_that_fails: ["done"],
    a_step_that_fails_and_is_tried_again: ["done"],
    a_step_that_undoes_a_part: ["before", "after"],
    a_step_after_one: ["done"],
}


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("do", STEPS)
def test_what_was_asked_in_a_step_that_failed_goes_with_it(do, atomic, world):
    work = Work(world)

    def step(name, function, work):
        try:
            current_operation.step(name, function, work, atomic=atomic)
        except Oops:
            if not atomic:
                work.session.rollback()
            raise

    @world.app.post("/payments")
    @idempotent(atomic=False)
    def pay():
        do(work, step)
        return {}, 201

    for _ in range(2):
        assert world.post().status_code == 201
    expect(work, STEPS[do])
    world.assert_clean()
