"""``flask.after_this_request``: what the view registers belongs to the stored response."""

import pytest
from flask import Response, after_this_request

from flask_idempotency import idempotent


@pytest.fixture
def shop(make_world):
    """An application in production; each function that was registered leaves its number."""
    world = make_world(PROPAGATE_EXCEPTIONS=False)
    world.ran = []

    def register(name, change=lambda response: response):
        @after_this_request
        def function(response):
            world.ran.append(name)
            response.headers.add("X-Ran", f"{name} {len(world.ran)}")
            return change(response)

        return {"id": 1}, 201

    world.register = register
    return world


def ran(response):
    return response.headers.getlist("X-Ran")


def pays(shop):
    shop.db.session.add(shop.Payment(amount=5))
    return shop.register("view", lambda response: shop.db.session.commit() or response)


def fail(_response):
    raise LookupError("a mistake in the function")


async def other(_response):
    return Response("other", 202)


STORED = {
    "it registers another": (
        lambda shop: shop.register("one", lambda response: (shop.register("two"), response)[1]),
        201,
        ["one 1", "two 2"],
    ),
    "it makes another response": (lambda _shop: (after_this_request(other), {})[1], 202, []),
    "it commits what the view has written": (pays, 201, ["view 1"]),
    "its error is handled": (
        lambda shop: (shop.register("view", fail), shop.register("after it"))[1],
        409,
        ["after it 2"],
    ),
}


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize(("view", "status", "names"), STORED.values(), ids=STORED)
def test_it_runs_once_and_its_effect_is_stored(shop, assert_replayed, view, status, names, atomic):
    shop.app.register_error_handler(LookupError, lambda _error: ("handled", 409))
    protected = idempotent(atomic=atomic)(lambda: view(shop))
    shop.app.add_url_rule("/payments", "pay", protected, methods=["POST"])
    first = shop.post()
    assert (first.status_code, ran(first)) == (status, names)
    assert_replayed(first, shop.post())


@pytest.mark.parametrize(
    ("function", "status"), [(fail, 500), (lambda _response: Response(status=503), 503)]
)
def test_what_the_functions_leave_says_whether_it_is_stored(shop, function, status):
    @shop.app.post("/payments")
    @idempotent
    def view():
        shop.db.session.add(shop.Payment(amount=5))
        shop.db.session.commit()
        return shop.register("view", function)

    for _ in range(2):
        response = shop.post()
        assert response.status_code == status
        assert "Idempotent-Replayed" not in response.headers
    assert (shop.ran.count("view"), shop.count()) == (2, 0)


def test_what_is_registered_before_the_view_or_above_it_runs_on_every_response(shop):
    shop.app.before_request(lambda: shop.register("before") and None)
    protected = idempotent(lambda: shop.register("view"))

    @shop.app.post("/payments")
    def above():
        shop.register("above")
        response = protected()
        shop.register("later")
        return response

    first, again = shop.post(), shop.post()
    assert ran(first) == ["view 1", "before 2", "above 3", "later 4"]
    assert ran(again) == ["view 1", "before 5", "above 6", "later 7"]
