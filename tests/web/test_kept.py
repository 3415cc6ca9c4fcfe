"""Which responses are kept, and that the view's writes are there if and only if its response is."""

import pytest
from flask import abort

from flask_idempotency import current_operation, idempotent

KEPT = [200, 204, 303, 400, 402, 404, 407, 409, 424, 426, 428, 430, 499]
NOT_KEPT = [401, 403, 408, 425, 429, 500, 503, 599]
UNKNOWN = [0, 99, 600, 99999]
"""No client understands these: they are not kept, and are a 500."""


class OutOfStock(Exception):
    pass


class Broken(Exception):
    pass


@pytest.fixture
def pay(world):
    def pay():
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()

    return pay


def returned(status):
    return "", status


def raised(status):
    raise {409: OutOfStock, 500: Broken}[status]


accepts = {"store": lambda response: response.status_code in {201, 503, *UNKNOWN}}
WAYS = {
    "returned": (returned, {}, KEPT, NOT_KEPT),
    "aborted": (abort, {}, [400, 404, 409, 422], [401, 403, 429, 500, 503]),
    "an error handler's": (raised, {}, [409], [500]),
    "as the route says": (returned, accepts, [201, 503], [200, 404]),
    "that no client understands": (returned, accepts, [], UNKNOWN),
}


@pytest.mark.parametrize(("does", "options", "kept", "not_kept"), WAYS.values(), ids=WAYS)
def test_writes_are_there_if_and_only_if_the_response_is(
    app, world, pay, caplog, does, options, kept, not_kept
):
    app.register_error_handler(OutOfStock, lambda _error: ("sold out", 409))
    app.register_error_handler(Broken, lambda _error: ("sorry", 500))
    attempts = []

    @app.post("/answer/<int:status>")
    @idempotent(**options)
    def view(status):
        attempts.append(current_operation.attempt)
        pay()
        return does(status)

    for number, status in enumerate([*kept, *not_kept]):
        is_kept = number < len(kept)
        before = world.count()
        first, retry = (world.post(f"/answer/{status}", key=f"key-{status}") for _ in range(2))
        assert first.status_code == retry.status_code == (500 if status in UNKNOWN else status)
        assert ("Idempotent-Replayed" in retry.headers) == is_kept, status
        assert world.count() - before == is_kept, status
        assert first.data == retry.data
        if status in UNKNOWN:
            assert f"the view returned the status {status}; allowed: 100 to 599" in caplog.text
    assert attempts == [1] * len(kept) + [1, 2] * len(not_kept)


def fails(error):
    raise error


def breaks_off():
    yield "one"
    raise ValueError


ENDS = {
    "an error": lambda: fails(ZeroDivisionError),
    "an exit": lambda: fails(SystemExit(1)),
    "a generator that fails": breaks_off,
    "no response": lambda: None,
}


@pytest.mark.parametrize("end", ENDS)
def test_what_ends_without_a_response_keeps_nothing_and_the_next_try_runs(app, world, pay, end):
    runs = []

    @app.post("/payments")
    @idempotent
    def view():
        runs.append(current_operation.attempt)
        pay()
        return ENDS[end]() if len(runs) == 1 else ("", 201)

    if end == "an exit":
        with pytest.raises(SystemExit):
            world.post()
    else:
        assert world.post().status_code == 500
    assert world.count() == 0
    assert [(record.state, record.body) for record in world.records()] == [("in_progress", None)]
    assert world.post().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"
    assert (runs, world.count()) == ([1, 2], 1)
