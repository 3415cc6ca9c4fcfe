"""``current_operation.connection`` beside ``db.session``: its writes are in no unit of that."""

from __future__ import annotations

import random

import pytest
import sqlalchemy as sa

from flask_idempotency import NotAtomic, current_operation, idempotent
from tests.integration.views import protect

COUNT = sa.text("select count(*) from payment")
POSTGRES = ("postgres", "psycopg2"), ("postgres", "psycopg")
EVERY = pytest.mark.parametrize(("store", "driver"), [*POSTGRES, ("sql", "psycopg2")], indirect=True)


@pytest.fixture
def world(make_world, store, tmp_path):
    here = {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"} if store == "sql" else {}
    return make_world(PROPAGATE_EXCEPTIONS=False, **here)


def write(world, amount):
    return sa.insert(world.Payment).values(amount=amount)


def top(world, amount=1):
    current_operation.connection.execute(write(world, amount))


def ours(world, amount=2):
    world.db.session.execute(write(world, amount))


def read(world):
    return world.db.session.scalar(COUNT)


def amounts(world):
    return [amount for (amount,) in world.sql("select amount from payment order by amount")]


def check(world, view, rows, status=201):
    """One request whose view answers 201, and which rows are there after it."""
    protect(world, lambda: view() or ({}, 201))
    assert world.post().status_code == status
    assert amounts(world) == rows


ENDS = {
    "rollback": lambda session: session.rollback(),
    "close": lambda session: session.close(),
    "remove": lambda session: session.remove(),
    "commit": lambda session: session.commit(),
    "nothing": lambda session: None,
}


@EVERY
@pytest.mark.parametrize("end", ENDS)
def test_a_write_after_a_read_of_the_session_outlasts_it(world, end):
    def pay():
        read(world)
        top(world)
        ENDS[end](world.db.session)
        return {"rows": read(world)}, 201

    protect(world, pay)
    first = world.post()
    assert (first.status_code, first.json) == (201, {"rows": 1})
    assert amounts(world) == [1]
    assert world.post().headers["Idempotent-Replayed"] == "true"


@EVERY
def test_a_write_before_the_first_statement_of_a_session_that_has_begun_outlasts_it(world):
    def pay():
        world.db.session.connection()
        top(world)
        world.db.session.rollback()

    check(world, pay, [1])


@EVERY
def test_the_session_goes_on_after_it_gave_way(world):
    def pay():
        for amount in 1, 2:
            read(world)
            top(world, amount)
            ours(world, 10 * amount)
            world.db.session.commit()
        read(world)
        top(world, 3)
        ours(world, 30)
        world.db.session.rollback()

    check(world, pay, [1, 2, 3, 10, 20])


@EVERY
@pytest.mark.parametrize("end", ENDS)
def test_a_write_after_the_sessions_own_is_refused(world, end):
    refused = []

    def pay():
        ours(world)
        with pytest.raises(NotAtomic, match="commit one before using the other") as caught:
            top(world)
        refused.append(caught.value)
        ENDS[end](world.db.session)

    check(world, pay, [], status=500)
    assert refused


@EVERY
def test_a_read_after_the_sessions_own_write_sees_it(world):
    def pay():
        world.db.session.add(world.Payment(amount=2))
        world.db.session.flush()
        rows = current_operation.connection.scalar(COUNT)
        world.db.session.commit()
        return {"rows": rows}, 201

    protect(world, pay)
    assert world.post().json == {"rows": 1}
    assert amounts(world) == [2]


@EVERY
@pytest.mark.parametrize("undo", [False, True])
def test_a_savepoint_around_what_the_session_reads(world, undo):
    def pay():
        top(world, 0)
        with current_operation.connection.begin_nested() as savepoint:
            top(world)
            read(world)
            top(world, 2)
            read(world)
            if undo:
                savepoint.rollback()
        world.db.session.rollback()
        ours(world, 3)
        world.db.session.commit()
        return {"rows": read(world)}, 201

    check(world, pay, ([0, 3] if undo else [0, 1, 2, 3]))


@EVERY
def test_a_session_may_commit_inside_a_savepoint_that_is_released(world):
    def pay():
        with current_operation.connection.begin_nested():
            top(world)
            ours(world)
            world.db.session.commit()
            with current_operation.connection.begin_nested() as inner:
                top(world, 3)
                inner.rollback()
            read(world)
        ours(world, 4)
        world.db.session.rollback()

    check(world, pay, [1, 2])


@EVERY
@pytest.mark.parametrize("deep", [False, True])
def test_a_savepoint_that_takes_a_commit_of_the_session_along_is_refused(world, deep):
    def pay():
        outer = current_operation.connection.begin_nested()
        if deep:
            with current_operation.connection.begin_nested():
                ours(world)
                world.db.session.commit()
        else:
            ours(world)
            world.db.session.commit()
        with pytest.raises(NotAtomic, match="savepoint"):
            outer.rollback()

    check(world, pay, [], status=500)


@EVERY
def test_a_savepoint_that_was_gone_back_to_is_still_there(world):
    """As text: SQLAlchemy goes back to each but once."""

    def pay():
        connection = current_operation.connection
        connection.execute(sa.text("savepoint here"))
        top(world)
        connection.execute(sa.text("rollback to here"))
        ours(world)
        world.db.session.commit()
        with pytest.raises(NotAtomic, match="savepoint"):
            connection.execute(sa.text("rollback to here"))

    check(world, pay, [], status=500)


@pytest.mark.parametrize(("store", "driver"), POSTGRES, indirect=True)
def test_a_savepoint_between_other_statements_is_refused(world):
    def pay():
        with pytest.raises(NotAtomic, match="savepoint"):
            current_operation.connection.execute(sa.text("savepoint here; select 1"))
        return {}, 201

    protect(world, pay)
    assert world.post().status_code == 500


@EVERY
@pytest.mark.parametrize(
    "use",
    [
        lambda world, _savepoint: top(world),
        lambda _world, savepoint: savepoint.commit(),
        lambda _world, savepoint: savepoint.rollback(),
    ],
    ids=["write", "release", "undo"],
)
def test_a_savepoint_around_what_the_session_has_not_committed_is_refused(world, use):
    def pay():
        savepoint = current_operation.connection.begin_nested()
        ours(world)
        with pytest.raises(NotAtomic, match="commit one before using the other"):
            use(world, savepoint)

    check(world, pay, [], status=500)


@EVERY
@pytest.mark.parametrize("written", [False, True])
def test_a_write_inside_a_savepoint_of_the_session_is_refused(world, written):
    def pay():
        with world.db.session.begin_nested():
            ours(world) if written else read(world)
            with pytest.raises(NotAtomic, match="commit one before using the other"):
                top(world)
            raise LookupError

    check(world, pay, [], status=500)


@EVERY
def test_a_write_after_a_savepoint_of_the_session_outlasts_it(world):
    def pay():
        with world.db.session.begin_nested():
            read(world)
        top(world)
        world.db.session.rollback()

    check(world, pay, [1])


@EVERY
def test_the_driver_behind_the_connection_outlasts_the_session_too(world):
    def pay():
        read(world)
        pooled = current_operation.connection.connection
        pooled.cursor().execute("insert into payment (amount) values (1)")
        read(world)
        pooled.driver_connection.cursor().execute("insert into payment (amount) values (2)")
        world.db.session.rollback()

    check(world, pay, [1, 2])


@pytest.mark.parametrize(("store", "driver"), POSTGRES, indirect=True)
def test_what_a_listener_of_the_pool_sends_with_a_cursor_it_kept_is_the_sessions(world):
    """It was given the driver's connection, which the session has: so it is without us."""
    cursors = []

    def listen(driver, _record, _pooled):
        cursors.append(driver.cursor())
        for statement in "savepoint here", "set application_name = 'listened'", "release here":
            cursors[-1].execute(statement)

    with world.app.app_context():
        sa.event.listen(world.db.engine, "checkout", listen)

    def pay():
        read(world)
        cursors[-1].execute("insert into payment (amount) values (1)")
        world.db.session.rollback()
        return {"name": world.db.session.scalar(sa.text("show application_name"))}, 201

    protect(world, pay)
    assert world.post().json == {"name": "listened"}
    assert amounts(world) == []


@pytest.mark.parametrize(("store", "driver"), POSTGRES, indirect=True)
def test_what_a_function_wrote_counts_as_written(world):
    world.sql(
        'create function "payNow"() returns void language sql'
        " as 'insert into payment (amount) values (2)'"
    )

    def pay():
        with current_operation.connection.begin_nested():
            top(world)  # has a lock on a number of its own, as what the session writes would have
            world.db.session.execute(sa.text('select "payNow"()'))
            with pytest.raises(NotAtomic, match="commit one before using the other"):
                top(world)

    check(world, pay, [], status=500)


@pytest.mark.parametrize(("store", "driver"), POSTGRES, indirect=True)
def test_at_serializable_it_may_write_after_a_read_of_the_session(make_world):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"isolation_level": "SERIALIZABLE"})

    def pay():
        read(world)
        top(world)
        world.db.session.rollback()

    check(world, pay, [1])


@EVERY
def test_in_a_step_it_is_the_same(world):
    def save():
        read(world)
        top(world)
        world.db.session.rollback()

    @world.app.post("/payments")
    @idempotent(atomic=False, on_interrupted="retry")
    def pay():
        current_operation.step("save", save, atomic=True)
        return {}, 201

    assert world.post().status_code == 201
    assert amounts(world) == [1]


class Account:
    """Does to both connections what a seed says, and keeps account of which rows have to stay."""

    def __init__(self, world, seed):
        self.world, self.chance = world, random.Random(seed)  # noqa: S311
        self.saved, self.inside, self.mine, self.savepoint = [], [], [], None

    def act(self, number):
        deeds = self.read, self.write_top, self.write_ours, self.commit, self.undo, self.save, self.end
        self.chance.choice(deeds)(number)

    def read(self, _number):
        assert read(self.world) == len(self.saved + self.inside + self.mine)

    def write_top(self, number):
        if not self.mine:
            top(self.world, number)
            (self.saved if self.savepoint is None else self.inside).append(number)

    def write_ours(self, number):
        if self.savepoint is None:
            ours(self.world, number)
            self.mine.append(number)

    def commit(self, _number):
        self.world.db.session.commit()
        self.saved += self.mine
        self.mine = []

    def undo(self, _number):
        self.chance.choice([ENDS["rollback"], ENDS["close"], ENDS["remove"]])(self.world.db.session)
        self.mine = []

    def save(self, _number):
        if self.savepoint is None and not self.mine:
            self.savepoint = current_operation.connection.begin_nested()

    def end(self, _number):
        if self.savepoint is None:
            return
        if self.chance.random() < 0.5:
            self.savepoint.rollback()
        else:
            self.savepoint.commit()
            self.saved += self.inside
        self.savepoint, self.inside = None, []


@EVERY
def test_in_any_order_what_is_to_stay_is_there(world):
    accounts = []

    def pay():
        accounts.append(account := Account(world, len(accounts)))
        for number in range(12):
            account.act(number)
        account.undo(0)
        return {}, 201

    protect(world, pay)
    for seed in range(60):
        assert world.post(key=f"key-{seed}").status_code == 201, seed
        assert amounts(world) == sorted(accounts[-1].saved + accounts[-1].inside), seed
        world.sql("delete from payment")
