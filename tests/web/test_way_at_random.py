"""Random ways of a request: what is stored has its rows, and what is not stored has none.

What an operation does is decided by its view; decorators, error handlers and functions after the
request commit, roll back, raise and swallow errors around it. Beside it runs the same application
without protection.
"""

import random

import pytest
from flask import abort
from werkzeug.exceptions import HTTPException

from flask_idempotency import idempotent
from tests.web.way import KINDS, Refused, around, fail

ROUNDS = 25
"""For each kind of attempt. More, by hand, take a minute for a hundred."""

VIEW, DECORATOR, HANDLER, AFTER = 1, 2, 3, 4
"""Who has written a row: its amount."""


def drawn(seed):
    """What the parts of one application do: lists of steps, and how each ends."""
    rng = random.Random(seed)  # noqa: S311 -- the same in every run

    def steps(most):
        some = ["write", "commit", "rollback", "buy", "buy"]
        return [rng.choice(some) for _ in range(rng.randint(0, most))]

    return {
        "view": [*steps(3), rng.choice(["refuse", "divide", "409", "403", "500", "end", "end", "end"])],
        "decorator": rng.choice(["none", "none", "swallow", "after", "raise", "other error"]),
        "above": steps(2),
        "handler": rng.choice([None, Refused, Exception, HTTPException, 500]),
        "handling": steps(1),
        "status": rng.choice([200, 400, 409, 403, 500]),
        "after": rng.choice(
            [[], [], ["commit"], ["rollback"], ["buy"], ["divide"], ["write", "commit"]]
        ),
        "propagates": rng.choice([False, False, False, True]),
    }


def do(shop, steps, who):
    session = shop.db.session
    for step in steps:
        if step in ("write", "buy"):
            session.add(shop.Payment(amount=who))
        if step in ("commit", "buy"):
            session.commit()
        if step == "rollback":
            session.rollback()
        if step == "refuse":
            fail()
        if step == "divide":
            raise ZeroDivisionError
        if step.isdigit():
            abort(int(step))


def build(shop, way, protect):
    runs, kind = [], way["decorator"]

    def pay():
        runs.append(1)
        do(shop, way["view"], VIEW)
        return {"run": len(runs)}, 201

    def decorator(view):
        try:
            response = view()
        except Exception as error:
            if kind == "other error":
                raise Refused from error
            if kind != "swallow":
                raise
            shop.db.session.rollback()
            do(shop, way["above"], DECORATOR)
            return {"swallowed": True}
        if kind in ("after", "raise"):
            do(shop, way["above"], DECORATOR)
        return fail() if kind == "raise" else response

    def handle(_error):
        do(shop, way["handling"], HANDLER)
        return {"handled": True}, way["status"]

    @shop.app.after_request
    def after(response):
        do(shop, way["after"], AFTER)
        return response

    shop.app.add_url_rule("/payments", "pay", around(decorator)(protect(pay)), methods=["POST"])
    if way["handler"] is not None:
        shop.app.register_error_handler(way["handler"], handle)
    return runs


def sent(shop):
    """The status, and the rows that the view and what stands above it have written."""
    try:
        status = shop.post().status_code
    except (Refused, ZeroDivisionError, HTTPException):
        status = 500  # as a server would make it
    return status, shop.sql(f"select amount from payment where amount < {AFTER} order by amount")


@KINDS
@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_what_is_stored_has_its_rows(make_world, tmp_path, atomic):
    wrong = []
    for seed in range(ROUNDS):
        way = drawn(seed)
        plain, ours = (
            make_world(
                SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/{seed}-{name}.db",
                PROPAGATE_EXCEPTIONS=way["propagates"],
            )
            for name in ("plain", "ours")
        )
        build(plain, way, lambda view: view)
        runs = build(ours, way, idempotent(atomic=atomic))
        (_, expected), (status, first) = sent(plain), sent(ours)
        stored, ran, (_, again) = ours.records()[0].status, len(runs), sent(ours)
        faults = {
            "a stored success without its rows": atomic and (stored or 500) < 400 and first != expected,
            "a success that was sent without its rows": status < 400 and first != expected,
            "rows beside what is not stored": atomic and stored is None and (VIEW,) in first,
            "a second run of what is stored": stored and len(runs) != ran,
            "rows of a second run": stored and again.count((VIEW,)) != first.count((VIEW,)),
        }
        found = [fault for fault, is_so in faults.items() if is_so]
        wrong += [(seed, found, way, status, expected, first)] if found else []
    assert wrong == []
