"""Values that never reach the server, and statements that it does not understand."""

from __future__ import annotations

import sqlalchemy as sa
from flask import request

from tests.differential.harness import Family
from tests.drivers import EACH, PSYCOPG2

NUL, SURROGATE, EURO = "a\0b", "a\ud800b", "5 €"


class Unknown:
    """Nothing that a driver could adapt."""


def from_the_client(world):
    """What a client sent, as it is."""
    world.pay(1, request.get_json()["note"])


def in_orm(value):
    def send(world):
        world.pay(1, value)
        world.session.flush()

    return send


def in_text(value):
    def send(world):
        world.sql("insert into audit (text) values (:value)", value=value)

    return send


def in_core(value):
    def send(world):
        world.session.execute(sa.insert(world.Audit.__table__), [{"text": "a"}, {"text": value}])

    return send


def in_driver(value):
    def send(world):
        cursor = world.session.connection().connection.cursor()
        cursor.executemany("insert into audit (text) values (%s)", [("a",), (value,)])

    return send


SENDERS = {
    "a NUL in a model": in_orm(NUL),
    "a NUL in a statement": in_text(NUL),
    "a NUL in the driver": in_driver(NUL),
    "a lone surrogate in a model": in_orm(SURROGATE),
    "a lone surrogate in a statement": in_text(SURROGATE),
    "a value that cannot be adapted": in_text(Unknown()),
    "a value that cannot be adapted in one of many rows": in_core(Unknown()),
    "an integer that is too large": lambda world: world.session.execute(
        sa.insert(world.Payment).values(amount=2**31)
    ),
    "a statement that does not parse": lambda world: world.sql("selekt 1"),
    "a table that is not there": lambda world: world.sql("select * from nowhere"),
    "a division by zero": lambda world: world.sql("select 1 / 0"),
}

family = Family(mistakes=True)
written_into_the_text = Family()
"""What psycopg2 makes of values; psycopg sends them apart from the text."""


def caught_outside(send):
    """The error is caught, the session is rolled back, and the view goes on."""

    def view(world):
        world.pay(1)
        world.session.flush()
        with world.catching():
            send(world)
        world.session.rollback()
        world.pay(2)
        world.commit()

    return view


def caught_nested(send):
    """What was written in a nested transaction that failed is gone; the rest stays."""

    def view(world):
        world.pay(1)
        world.session.flush()
        with world.catching(), world.session.begin_nested():
            world.pay(2)
            world.session.flush()
            send(world)
        world.pay(3)
        world.commit()

    return view


def caught_after_nested(send):
    """A nested insert that the view rolled back; then the error; then a commit."""

    def view(world):
        nested = world.session.begin_nested()
        world.pay(1)
        world.session.flush()
        nested.rollback()
        with world.catching(), world.session.begin_nested():
            send(world)
        world.pay(2)
        world.commit()

    return view


def caught_by_a_commit(send):
    """The error strikes between the commit's statements and the next transaction's."""

    def view(world):
        world.pay(1)
        world.commit()
        with world.catching():
            send(world)
        world.session.rollback()
        with world.session.begin_nested():
            world.pay(2)
        world.commit()

    return view


def not_caught(send):
    def view(world):
        world.pay(1)
        world.session.flush()
        send(world)
        world.commit()

    return view


for name, send in SENDERS.items():
    family.add(f"{name}, caught", caught_outside(send))
    family.add(f"{name}, in a nested transaction", caught_nested(send))
    family.add(f"{name}, after a nested rollback", caught_after_nested(send))
for name in (
    "a NUL in a model",
    "a NUL in the driver",
    "a lone surrogate in a statement",
    "a value that cannot be adapted",
    "a statement that does not parse",
    "a division by zero",
):
    family.add(f"{name}, after a commit", caught_by_a_commit(SENDERS[name]))
    family.add(f"{name}, not caught", not_caught(SENDERS[name]), status=500)

# A text that the server has parsed, with values of another kind: then it cannot be parsed.
SHAPES = {
    "an empty tuple": ("select 1 where 1 in %s", ((1,),), ((),)),
    "None for a date": ("select date %s", ("2026-11-23",), (None,)),
    "a string in an interval": ("select interval '%s days'", (3,), ("three",)),
    "an empty tuple by name": ("select 1 where 1 in %(ids)s", {"ids": (1,)}, {"ids": ()}),
    "a tuple in a list": ("select %s", ([1],), ([(1,), ()],)),
}


def of_another_kind(text, good, bad, *, between):
    """Units are committed around it; the error must cost none of them."""

    def execute(world, values):
        world.session.connection().connection.cursor().execute(text, values)

    def view(world):
        world.pay(1)
        world.commit()
        execute(world, good)
        world.pay(2)
        world.commit()
        with world.catching():
            between(world, lambda: execute(world, bad))
        world.session.rollback()
        world.pay(4)
        world.commit()

    return view


def in_nested(world, send):
    with world.session.begin_nested():
        send()


def after_a_write(world, send):
    world.pay(3)
    world.session.flush()
    send()


for name, (text, good, bad) in SHAPES.items():
    for where, between in (
        ("alone", lambda world, send: send()),
        ("in a nested transaction", in_nested),
        ("after a write", after_a_write),
    ):
        view = of_another_kind(text, good, bad, between=between)
        written_into_the_text.add(f"{name}, {where}", view, mistakes=True)

LATIN = {"client_encoding": "latin1"}
for name, shape in (("caught", caught_outside), ("in a nested transaction", caught_nested)):
    family.add(f"text that the encoding has not, {name}", shape(in_orm(EURO)), engine_options=LATIN)


def not_found(world):
    @world.app.errorhandler(ValueError)  # psycopg2's
    @world.app.errorhandler(sa.exc.DataError)  # psycopg's
    def refuse(error):
        return {"error": "note"}, 400


@family(setup=not_found, status=400, json={"note": NUL})
def a_client_that_sends_a_nul_and_is_told_so(world):
    from_the_client(world)
    world.commit()


@family(status=500, json={"note": NUL})
def a_client_that_sends_a_nul(world):
    from_the_client(world)
    world.commit()


@family(status=409, json={"note": NUL})
def a_client_that_sends_a_nul_and_gets_a_409(world):
    world.audit()
    world.commit()
    try:
        with world.session.begin_nested():
            world.audit("inside")
            world.session.flush()
            from_the_client(world)
            world.session.flush()
    except (ValueError, sa.exc.DataError):
        world.commit()
        return {"error": "note"}, 409
    return None


@family(status=500)
def a_lone_surrogate_in_the_last_statement(world):
    """Nothing comes after it that could carry what was held back."""
    world.pay(1)
    nested = world.session.begin_nested()
    world.pay(2)
    world.session.flush()
    nested.rollback()
    world.pay(3, SURROGATE)
    world.session.flush()


@EACH
@family.in_every_store()
def test_a_statement_that_fails_costs_what_it_costs_without_us(hold, case, store):
    hold(case, store)


@PSYCOPG2
@written_into_the_text.in_every_store()
def test_so_does_one_that_cannot_be_parsed_with_other_values(hold, case, store):
    hold(case, store)
