"""What was rolled back to a savepoint is no uncommitted work: get-or-create, as SQLAlchemy shows it."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import NotAtomic, idempotent


def get_or_create(world, note="taken"):
    """SQLAlchemy's own recipe for "insert if it is not there"."""
    session = world.db.session
    try:
        with session.begin_nested():
            session.add(world.Payment(amount=1, note=note))
        return "new"
    except sa.exc.IntegrityError:
        return "old"


def in_text(world):
    session = world.db.session
    session.execute(sa.text("SAVEPOINT mine"))
    session.execute(sa.text("INSERT INTO payment (amount) VALUES (1)"))
    session.execute(sa.text("ROLLBACK TO SAVEPOINT mine"))


def by_hand(world):
    nested = world.db.session.begin_nested()
    world.db.session.add(world.Payment(amount=2))
    world.db.session.flush()
    nested.rollback()


def in_a_loop(world):
    assert {get_or_create(world) for _ in range(3)} == {"old"}


def inside_another(world):
    with world.db.session.begin_nested():
        assert get_or_create(world) == "old"


def after_a_commit(world):
    world.db.session.add(world.Payment(amount=3, note="kept"))
    world.db.session.commit()
    assert get_or_create(world) == "old"


WAYS = [get_or_create, in_text, by_hand, in_a_loop, inside_another, after_a_commit]


@pytest.fixture
def taken(world):
    world.sql("insert into payment (amount, note) values (1, 'taken')")
    return world


@pytest.mark.parametrize("way", WAYS)
def test_a_view_that_left_nothing_else_is_stored(taken, way):
    @taken.app.post("/payments")
    @idempotent
    def pay():
        way(taken)
        return {}, 200

    first, again = taken.post(), taken.post()
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.headers["Idempotent-Replayed"] == "true"
    assert taken.count() == 1 + (way is after_a_commit)
    taken.assert_clean()


@pytest.mark.parametrize("where", ["before", "after", "around"])
def test_what_was_written_outside_of_the_savepoint_is_refused_as_before(taken, where):
    def write():
        taken.db.session.execute(sa.text("INSERT INTO payment (amount) VALUES (9)"))

    @taken.app.post("/payments")
    @idempotent
    def pay():
        if where != "after":
            write()
        get_or_create(taken)
        if where != "before":
            write()
        return {}, 200

    assert taken.post().status_code == 500
    assert taken.count() == 1
    taken.assert_clean()


@pytest.mark.parametrize("way", [get_or_create, in_text, by_hand, in_a_loop])
@pytest.mark.parametrize("atomic", [True, False])
def test_it_may_come_before_the_view(taken, way, atomic):
    runs = []
    taken.app.before_request(lambda: way(taken) and None)

    @taken.app.post("/payments")
    @idempotent(atomic=atomic)
    def pay():
        runs.append(1)
        taken.db.session.add(taken.Payment(amount=1))
        taken.db.session.commit()
        return {}, 201

    assert [taken.post().status_code, taken.post().status_code, runs] == [201, 201, [1]]
    assert taken.count() == 2
    taken.assert_clean()


@pytest.mark.parametrize(
    "more",
    [
        "INSERT INTO payment (amount) VALUES (9)",
        "SELECT * FROM payment FOR UPDATE",
        "CREATE TABLE more (id int)",
        "SELECT lo_put(lo_create(0), 0, 'x')",
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_what_was_also_written_before_the_view_is_refused_as_before(taken, more, order):
    @taken.app.before_request
    def before():
        for do in [lambda: get_or_create(taken), lambda: taken.db.session.execute(sa.text(more))][
            ::order
        ]:
            do()

    @taken.app.post("/payments")
    @idempotent
    def pay():
        return {}, 201

    assert taken.post().status_code == 500
    taken.assert_clean()


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_left_nothing_else_ends_well(taken, way, atomic):
    def job():
        way(taken)
        return "done"

    with taken.app.app_context():
        results = {
            taken.idempotency.run("k", job, scope="s", name="job", atomic=atomic) for _ in range(2)
        }
    assert results == {"done"}
    taken.assert_clean()


def test_a_session_that_needs_a_rollback_disturbs_no_later_job(taken):
    """The first one's error is its own; the next begins as in a context of its own."""

    def fail():
        taken.db.session.add(taken.Payment(amount=1, note="taken"))
        taken.db.session.commit()

    def swallow():
        with pytest.raises(sa.exc.IntegrityError):
            fail()

    def pay():
        taken.db.session.add(taken.Payment(amount=1))
        taken.db.session.commit()
        return "paid"

    def run(key, job):
        return taken.idempotency.run(key, job, scope="s", name="job", atomic=False)

    with taken.app.app_context():
        with pytest.raises(sa.exc.IntegrityError):
            run("1", fail)
        assert run("2", pay) == "paid"
        run("3", swallow)
        assert run("4", pay) == "paid"
    assert taken.count() == 3
    taken.assert_clean()


def test_a_session_on_an_engine_of_somebody_elses_is_refused(world):
    """Its commit would be one of its own, with the same URL as with another."""
    with world.app.app_context():
        other = sa.create_engine(world.db.engine.url)
    statement = sa.insert(world.Payment).values(amount=1)
    errors = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        try:
            world.db.session.execute(statement, bind_arguments={"bind": other})
        except NotAtomic as error:
            errors.append(str(error))
            raise
        world.db.session.commit()
        return {}, 201

    assert [world.post().status_code for _ in range(2)] == [500, 500]
    assert world.count() == 0
    assert "an engine that is none of its application's" in errors[0]
    other.dispose()
    world.assert_clean()
