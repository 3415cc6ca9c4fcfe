"""Random ways of a request: what is stored has its rows, and what is not stored has none.

What an operation does is decided by its view; decorators, error handlers and functions after the
request commit, roll back, raise and swallow errors around it. Beside it runs the same application
without protection.
"""

import random
from dataclasses import dataclass
from functools import wraps

import pytest
from flask import abort
from werkzeug.exceptions import HTTPException

from flask_idempotency import idempotent

ROUNDS = 25
"""For each kind of attempt. More, by hand, take a minute for a hundred."""

VIEW, DECORATOR, HANDLER, AFTER = 1, 2, 3, 4
"""Who has written a row: its amount."""


class Refused(Exception):
    """An error of the application."""


@dataclass
class Way:
    """What the parts of one application do: lists of steps, and how each ends."""

    view: list[str]
    decorator: str
    above: list[str]
    handler: object
    handling: list[str]
    status: int
    after: list[str]
    propagates: bool

    @classmethod
    def drawn(cls, seed):
        rng = random.Random(seed)  # noqa: S311 -- the same in every run
        some = ["write", "commit", "rollback", "buy", "buy"]

        def steps(most, *ends):
            return [rng.choice(some) for _ in range(rng.randint(0, most))] + [*ends]

        return cls(
            steps(3, rng.choice(["refuse", "divide", "409", "403", "500", "end", "end", "end"])),
            rng.choice(["none", "none", "swallow", "after", "raise", "other error"]),
            steps(2),
            rng.choice([None, Refused, Exception, HTTPException, 500]),
            steps(1),
            rng.choice([200, 400, 409, 403, 500]),
            rng.choice([[], [], ["commit"], ["rollback"], ["buy"], ["divide"], ["write", "commit"]]),
            rng.choice([False, False, False, True]),
        )


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
            raise Refused
        if step == "divide":
            raise ZeroDivisionError
        if step.isdigit():
            abort(int(step))


def around(shop, way, view):
    """The decorator of the way, above ``view``."""

    def recover(error):
        if way.decorator == "other error":
            raise Refused from error
        shop.db.session.rollback()
        do(shop, way.above, DECORATOR)
        return {"swallowed": True}

    @wraps(view)
    def call():
        try:
            response = view()
        except Exception as error:
            if way.decorator not in ("swallow", "other error"):
                raise
            return recover(error)
        if way.decorator in ("after", "raise"):
            do(shop, way.above, DECORATOR)
        if way.decorator == "raise":
            raise Refused
        return response

    return call


def build(shop, way, **options):
    runs = []

    def pay():
        runs.append(1)
        do(shop, way.view, VIEW)
        return {"run": len(runs)}, 201

    view = around(shop, way, idempotent(**options)(pay))
    shop.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    if way.handler is not None:

        def handle(_error):
            do(shop, way.handling, HANDLER)
            return {"handled": True}, way.status

        shop.app.register_error_handler(way.handler, handle)

    @shop.app.after_request
    def after(response):
        do(shop, way.after, AFTER)
        return response

    return runs


def status_of(shop):
    try:
        return shop.post().status_code
    except (Refused, ZeroDivisionError, HTTPException):
        return 500  # as a server would make it


def rows(shop):
    """How many rows the view and what stands above it have written."""
    return shop.sql(f"select amount from payment where amount < {AFTER} order by amount")


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_what_is_stored_has_its_rows(make_world, tmp_path, atomic):
    wrong = []
    for seed in range(ROUNDS):
        way = Way.drawn(seed)
        plain, ours = (
            make_world(
                SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/{seed}-{enabled}.db",
                PROPAGATE_EXCEPTIONS=way.propagates,
                IDEMPOTENCY_ENABLED=enabled,
            )
            for enabled in (False, True)
        )
        build(plain, way)
        runs = build(ours, way, **({} if atomic else {"atomic": False}))
        statuses = status_of(plain), status_of(ours)
        expected, first = rows(plain), rows(ours)
        status, ran = ours.records()[0].status, len(runs)
        status_of(ours)
        again = rows(ours)
        is_stored, is_sent = status is not None, statuses[1] < 400
        faults = {
            "a stored success without its rows": atomic
            and is_stored
            and status < 400
            and first != expected,
            "a success that was sent without its rows": is_sent and first != expected,
            "rows beside what is not stored": atomic and not is_stored and (VIEW,) in first,
            "a second run of what is stored": is_stored and len(runs) != ran,
            "rows of a second run": is_stored and again.count((VIEW,)) != first.count((VIEW,)),
        }
        found = [fault for fault, is_so in faults.items() if is_so]
        wrong += [(seed, found, way, statuses, expected, first)] if found else []
    assert wrong == []
