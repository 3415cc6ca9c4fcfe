"""Random ways of a request: what is stored has its rows, and what is not stored has none.

What an operation does is decided by its view; decorators, error handlers and functions after the
request commit, roll back, raise and swallow errors around it. Beside it runs the same application
without protection.
"""

import random

import pytest
from werkzeug.exceptions import HTTPException

from flask_idempotency import idempotent
from tests.web.way import KINDS, Refused, Way, build, rows

ROUNDS = 25
"""For each kind of attempt. More, by hand, take a minute for a hundred."""


def drawn(seed):
    """A way, and whether the application propagates errors."""
    rng = random.Random(seed)  # noqa: S311 -- the same in every run

    def words(most, *ends):
        some = ["write", "commit", "rollback", "buy", "buy"]
        return ", ".join([*(rng.choice(some) for _ in range(rng.randint(0, most))), *ends])

    view = words(3, rng.choice(["refuse", "divide", "409", "403", "500", "", "", ""]))
    decorator = rng.choice(["none", "none", "responds", "after", "raise", "another"])
    above = words(2, *(["refuse"] if decorator == "raise" else []))
    return Way(
        view,
        above if decorator in ("responds", "after", "raise") else "",
        decorator,
        rng.choice([None, Refused, Exception, HTTPException, 500]),
        words(1),
        rng.choice([200, 400, 409, 403, 500]),
        rng.choice(["", "", "commit", "rollback", "buy", "divide", "write, commit"]),
    ), rng.choice([False, False, False, True])


def sent(shop):
    """The status, and the rows that the view and what stands above it have written."""
    try:
        status = shop.post().status_code
    except (Refused, ZeroDivisionError, HTTPException):
        status = 500  # as a server would make it
    return status, rows(shop).rstrip("4")


@KINDS
@pytest.mark.parametrize("store", ["sql"], indirect=True)
def test_what_is_stored_has_its_rows(make_world, tmp_path, atomic):
    wrong = []
    for seed in range(ROUNDS):
        way, propagates = drawn(seed)
        plain, ours = (
            make_world(
                SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/{seed}-{name}.db",
                PROPAGATE_EXCEPTIONS=propagates,
            )
            for name in ("plain", "ours")
        )
        build(plain, way, lambda view: view)
        runs, _ = build(ours, way, idempotent(atomic=atomic))
        (_, expected), (status, first) = sent(plain), sent(ours)
        stored, ran, (_, again) = ours.records()[0].status, len(runs), sent(ours)
        faults = {
            "a stored success without its rows": atomic and (stored or 500) < 400 and first != expected,
            "a success that was sent without its rows": status < 400 and first != expected,
            "rows beside what is not stored": atomic and stored is None and "1" in first,
            "a second run of what is stored": stored and len(runs) != ran,
            "rows of a second run": stored and again.count("1") != first.count("1"),
        }
        found = [fault for fault, is_so in faults.items() if is_so]
        wrong += [(seed, found, way, status, expected, first)] if found else []
    assert wrong == []
