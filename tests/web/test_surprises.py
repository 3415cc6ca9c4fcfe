"""What is so by design and may surprise: each has its sentence in the guarantees."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from flask_idempotency import idempotent


def test_a_counter_of_wrong_pins_counts_only_on_a_connection_of_its_own(world):
    """The 403 says that the answer is not kept, and what is not kept is rolled back."""
    count_up = sa.insert(world.Payment).values(amount=1)

    def own_connection():
        with world.db.engine.begin() as connection:
            connection.execute(count_up)

    def session():
        world.db.session.execute(count_up)
        world.db.session.commit()

    for count in session, own_connection:
        view = idempotent(lambda count=count: (count(), ({}, 403))[1])
        world.app.add_url_rule(f"/{count.__name__}", count.__name__, view, methods=["POST"])
    for path, counted in ("/session", 0), ("/own_connection", 2):
        assert [world.post(path).status_code for _ in range(2)] == [403, 403]
        assert world.count() == counted


@pytest.mark.parametrize(("status", "left"), [(201, 1), (403, 0)])
def test_what_a_view_leaves_on_its_connection_stays_if_the_answer_is_kept(make_world, status, left):
    """A temporary table is made by a statement like others; a lock of the session is by none."""
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 1, "max_overflow": 0})
    locks = []

    @world.app.post("/payments")
    @idempotent
    def pay():
        execute = world.db.session.execute
        execute(sa.text("create temp table basket as select now() as began"))
        execute(sa.text("select pg_advisory_lock(1), pg_advisory_xact_lock(2)"))
        world.db.session.commit()
        assert execute(sa.text("select began = now() from basket")).scalar_one()
        locked = "select objid::int from pg_locks where locktype = 'advisory' order by objid"
        locks.append(list(execute(sa.text(locked)).scalars()))
        return {}, status

    assert world.post().status_code == status
    assert locks == [[1, 2]]
    found = world.sql(
        "select (select count(*) from pg_class where relname = 'basket' and relpersistence = 't'),"
        " (select count(*) from pg_locks where locktype = 'advisory')"
    )
    assert found == [(left, 1)]
