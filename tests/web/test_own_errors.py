"""Our errors that are no problems go to the application's handlers, as any other error does."""

import pytest
import sqlalchemy as sa

from flask_idempotency import IdempotencyError, NotAtomic, idempotent


def nest_before(world):
    world.app.before_request(lambda: world.db.session.begin_nested() and None)


def send_commit(world):
    world.db.session.execute(sa.text("commit"))


def leave_an_object(world):
    world.db.session.add(world.Payment(amount=1))


def leave_a_row(world):
    leave_an_object(world)
    world.db.session.flush()


@pytest.fixture(params=[nest_before, send_commit, leave_an_object, leave_a_row])
def shop(make_world, request):
    world = make_world(PROPAGATE_EXCEPTIONS=None)
    world.app.testing = False
    does = request.param
    if does is nest_before:
        does(world)

    @world.app.post("/payments")
    @idempotent
    def pay():
        if does is not nest_before:
            does(world)
        return {}, 201

    return world


@pytest.mark.parametrize("kind", [Exception, IdempotencyError])
def test_a_handler_receives_the_error_itself(shop, kind):
    """Or if it arises after the view, and the handler is not for ours, Flask's error around it."""
    shop.app.register_error_handler(kind, lambda error: ({"error": type(error).__name__}, 500))
    for _ in range(2):
        response = shop.post()
        assert response.status_code == 500
        assert response.json["error"] in ("NotAtomic", "InternalServerError")
        assert kind is Exception or response.json["error"] == "NotAtomic"
    assert shop.count() == 0
    shop.assert_clean()


def test_a_handler_of_problems_can_read_its_members_and_tells_a_client_nothing(shop):
    shop.app.register_error_handler(
        IdempotencyError, lambda error: ([error.type, error.title, error.retry_after], error.status)
    )
    response = shop.post()
    assert response.status_code == 500
    assert response.json == ["about:blank", "The request could not be served.", None]


def test_without_a_handler_it_is_flasks(shop, caplog):
    assert shop.post().status_code == 500
    assert any(record.exc_info and record.exc_info[0] is NotAtomic for record in caplog.records)


def test_a_handler_for_500_receives_flasks_error_around_it(shop):
    shop.app.register_error_handler(
        500, lambda error: ({"original": type(error.original_exception).__name__}, 500)
    )
    assert shop.post().json == {"original": "NotAtomic"}
