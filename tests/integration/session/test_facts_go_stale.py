"""What was asked of the database once, and is no longer so: a migration runs while the process does."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from flask import request

from flask_idempotency import idempotent

TABLES = """
    create schema hidden;
    create table account (id int primary key);
    create table entry (
        account int constraint entry_account references account deferrable initially deferred,
        other int constraint entry_other references account deferrable initially immediate,
        place int constraint entry_place unique deferrable initially deferred
    );
    create table hidden.log (id int constraint log_id unique deferrable initially deferred);
    insert into account values (1)
"""

MIGRATIONS = {
    "dropped": "alter table entry drop constraint entry_place",
    "dropped with its schema": "drop schema hidden cascade",
    "renamed": "alter table entry rename constraint entry_place to entry_position",
    "not deferrable": "alter table entry alter constraint entry_account not deferrable",
}

BOOK = sa.text("insert into entry (account, place) values (:account, :place)")


@pytest.fixture
def bank(world):
    """Runs a test's function as a protected view, on a database with constraints of all kinds."""
    world.sql(TABLES)
    world.app.testing = True
    views = {}

    @world.app.post("/<name>")
    @idempotent
    def run(name):
        return views[name](world.db.session) or ({}, 201)

    def post(view, key):
        views[view.__name__] = view
        return world.post(f"/{view.__name__}", key=key)

    world.act = post
    assert post(book, "before").status_code == 201
    return world


def book(session):
    """Commits twice."""
    places = session.scalar(sa.text("select count(*) from entry"))
    for place in (places + 1, places + 2):
        session.execute(BOOK, {"account": 1, "place": place})
        session.commit()
    return {"places": places + 2}, 201


def book_before_there_is_an_account(session, begin="select 1"):
    """Fails where the constraint of accounts is not checked at COMMIT, in either transaction."""
    for account in (7, 8):
        session.execute(sa.text(begin))
        session.execute(BOOK, {"account": account, "place": 100 + account})
        session.execute(sa.text("insert into account values (:id)"), {"id": account})
        session.commit()


@pytest.mark.parametrize("migration", MIGRATIONS.values(), ids=MIGRATIONS)
def test_a_deferred_constraint_that_changes_fails_no_request(bank, migration):
    bank.sql(migration)
    for number in (1, 2, 3):
        response = bank.act(book, key=f"after-{number}")
        assert (response.status_code, response.json) == (201, {"places": 2 * number + 2})
    if migration != MIGRATIONS["not deferrable"]:
        assert bank.act(book_before_there_is_an_account, key="late").status_code == 201


REFUSE = """
    create function refuse() returns trigger language plpgsql as $$ begin
        raise exception 'no such object' using errcode = 'undefined_object'; end $$;
    create constraint trigger refused after insert on entry deferrable initially deferred
        for each row when (new.place = 13) execute function refuse()
"""


@pytest.mark.parametrize(
    ("change", "values", "said"),
    [
        (MIGRATIONS["dropped"], {"account": 404, "place": 50}, "entry_account"),
        # It may have any SQLSTATE, such as that of a constraint that is not there.
        (REFUSE, {"account": 1, "place": 13}, "no such object"),
    ],
    ids=["once another constraint is gone", "a deferred trigger's"],
)
def test_a_violation_is_the_views(bank, change, values, said):
    """The check itself fails: nobody takes that for a constraint that is not there."""
    caught = []

    def wrong(session):
        session.execute(BOOK, values)
        try:
            session.commit()
        except sa.exc.DBAPIError as error:
            session.rollback()
            caught.append(str(error))
        session.execute(BOOK, {"account": 1, "place": 51})
        session.commit()

    bank.sql(change)
    assert bank.act(wrong, key="wrong").status_code == 201
    assert said in caught[0]
    assert bank.sql("select place from entry where place > 10") == [(51,)]


def test_what_is_deferred_from_now_on_fails_one_request_late_and_the_next_in_time(world):
    """Nobody asks again before COMMIT proves that the answer is old."""
    world.sql("create table entry (account int, place int)")
    world.sql("insert into entry values (1, 13)")
    caught = []

    @world.app.post("/payments")
    @idempotent
    def unlucky():
        if request.args:
            return {}, 201
        world.db.session.execute(BOOK, {"account": 1, "place": 13})
        try:
            world.db.session.commit()
        except sa.exc.SQLAlchemyError:
            world.db.session.rollback()
            caught.append(1)
            return {}, 409
        return {}, 201

    assert world.post("/payments?warm", key="warm").status_code == 201
    world.sql("alter table entry add constraint one unique (place) deferrable initially deferred")
    assert [world.post().status_code for _ in range(2)] == [500, 409]
    assert (caught, world.count("entry")) == ([1], 1)


@pytest.mark.parametrize("role", ["set local role clerk", "set role clerk"])
def test_a_role_that_may_not_see_a_constraints_schema_may_write(bank, role):
    bank.sql("""
        do $$ begin if not exists (select from pg_roles where rolname = 'clerk') then
            create role clerk; end if; end $$;
        grant all on entry, account to clerk
    """)

    def clerk(session):
        book_before_there_is_an_account(session, begin=role)
        session.execute(sa.text("reset role"))
        session.commit()

    def log(session):
        """Two of one number are there until just before the commit."""
        session.execute(sa.text("insert into hidden.log values (1), (1)"))
        session.execute(
            sa.text("delete from hidden.log where ctid in (select max(ctid) from hidden.log)")
        )
        session.commit()

    assert bank.act(clerk, key="clerk").status_code == 201
    assert bank.act(log, key="another-role").status_code == 201
