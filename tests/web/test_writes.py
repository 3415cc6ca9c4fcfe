"""A view's own rollbacks and database errors: what it left uncommitted is gone, the answer stays."""

from __future__ import annotations

from flask import request
from sqlalchemy.exc import DBAPIError, IntegrityError

from flask_idempotency import idempotent


def test_what_the_view_rolled_back_is_not_kept(world):
    @world.app.post("/payments")
    @idempotent
    def pay():
        session = world.db.session
        session.add(world.Payment(amount=1))
        session.commit()
        session.add(world.Payment(amount=2))
        session.flush()
        session.rollback()
        return {}, 201

    assert world.post().status_code == 201
    assert world.sql("select amount from payment") == [(1,)]


def add_taken_note(world):
    world.db.session.add(world.Payment(amount=1, note="taken"))


def test_an_integrity_error_the_view_answers_is_kept(world):
    world.sql("insert into payment (amount, note) values (0, 'taken')")

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=2))
        world.db.session.commit()
        try:
            add_taken_note(world)
            world.db.session.commit()
        except IntegrityError:
            world.db.session.rollback()
            return {"taken": True}, 409
        return {}, 201

    assert world.post().status_code == 409
    world.sql("delete from payment where note = 'taken'")
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert world.sql("select amount from payment") == [(2,)]


def test_a_database_error_that_an_error_handler_answers_is_kept(world):
    world.sql("insert into payment (amount, note) values (0, 'taken')")
    world.app.register_error_handler(IntegrityError, lambda error: ({"taken": True}, 409))
    world.app.register_error_handler(DBAPIError, lambda error: ({"wrong": True}, 400))

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=2))
        world.db.session.commit()
        if request.json["amount"] == 5:
            add_taken_note(world)
            world.db.session.flush()
        world.db.session.execute(world.db.text("select 1 / 0"))
        return {}, 201

    for key, amount, status in ("a", 5, 409), ("b", 6, 400):
        first, replay = (world.post(key=key, json={"amount": amount}) for _ in range(2))
        assert (first.status_code, replay.status_code) == (status, status)
        assert replay.headers["Idempotent-Replayed"] == "true"
    assert world.sql("select amount from payment order by id") == [(0,), (2,), (2,)]


def test_a_deferred_constraint_that_fails_at_the_commit_keeps_nothing(world):
    """The error comes as SQLAlchemy's own, as it would without us."""
    world.sql("alter table payment add constraint one unique (amount) deferrable initially deferred")
    world.sql("insert into payment (amount) values (5)")
    caught = []

    @world.app.errorhandler(IntegrityError)
    def note(error):
        caught.append(error.orig.pgcode)
        return {}, 409

    @world.app.post("/payments")
    @idempotent
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {}, 201

    assert [world.post().status_code for _ in range(2)] == [409, 409]
    assert caught == ["23505"], "the view's own commit raised it, so its response is stored"
    world.sql("delete from payment")
    assert world.post(key="key-2").status_code == 201
    assert world.count() == 1
