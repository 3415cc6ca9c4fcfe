"""Values that never reach the server, where an encoding, a client or the last statement brings them.

What each of them costs: ``tests.differential.tables``, and ``documented_kept`` for texts that were
parsed with other values.
"""

from __future__ import annotations

import sqlalchemy as sa
from flask import request

from tests.differential.harness import Family
from tests.drivers import EACH

NUL, SURROGATE, EURO = "a\0b", "a\ud800b", "5 €"


def from_the_client(world):
    """What a client sent, as it is."""
    world.pay(1, request.get_json()["note"])


def in_orm(value):
    def send(world):
        world.pay(1, value)
        world.session.flush()

    return send


family = Family(mistakes=True)


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
