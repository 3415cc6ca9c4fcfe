"""What ``flask idempotency check`` says of the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Blueprint, Flask
from flask.views import MethodView, View
from flask_login import LoginManager
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent
from tests.integration.commands.running import build_console, findings, not_ok, runner


class Shop:
    """An application on SQLite."""

    def __init__(self, folder: Any, scope: Any = None, **config: Any) -> None:
        self.app = Flask("shop")
        self.app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{folder}/shop.db"
        self.app.config.update({"IDEMPOTENCY_STORE": "sql", **config})
        self.db = SQLAlchemy(self.app)
        self.idempotency = Idempotency(self.app, self.db, scope=scope)
        with self.app.app_context():
            self.db.create_all()
        self.run = runner(self.app)

    def add(self, endpoint: str, view: Any, *methods: str, target: Any = None) -> None:
        methods = methods or ("POST",)
        (target or self.app).add_url_rule(f"/{endpoint}", endpoint, view, methods=list(methods))

    def said(self, subject: str) -> str:
        """The line of a subject and its remedy, of a check."""
        lines = self.run("check").output.splitlines()
        (at,) = [number for number, line in enumerate(lines) if line[8:22].strip() == subject]
        remedy = lines[at + 1 : at + 2]
        return " ".join(lines[at][22:].split() + [word for line in remedy for word in line.split()])


@pytest.fixture
def make_shop(tmp_path: Any) -> Iterator[Callable[..., Shop]]:
    shops: list[Shop] = []

    def make(**config: Any) -> Shop:
        shops.append(Shop(tmp_path, **config))
        return shops[-1]

    yield make
    for shop in shops:
        with shop.app.app_context():
            shop.db.engine.dispose()


@pytest.fixture
def shop(make_shop: Callable[..., Shop]) -> Shop:
    return make_shop()


def pay() -> Any:
    return {}, 201


def nameless(view: Any) -> Any:
    """A decorator without ``functools.wraps``."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        return view(*args, **kwargs)

    return inner


def allowed(operation: Any) -> bool:
    return True


def test_what_a_terminal_would_obey_is_escaped(shop):
    shop.add("\x1b[31mred\u202e", lambda: pay())  # noqa: PLW0108 -- not the function that is decorated
    text, as_json = shop.run("check").output, shop.run("check", "--json").output
    for output in text, as_json:
        assert "\x1b" not in output
        assert "\u202e" not in output
    assert r"not protected: \x1b[31mred\u202e" in text


def test_check_counts_what_is_protected_and_names_the_rest(shop):
    blueprint = Blueprint("api", __name__)
    shop.idempotency.protect(blueprint)
    shop.add("a", pay, target=blueprint)
    shop.app.register_blueprint(blueprint)
    shop.add("b", idempotent(pay), "POST", "PUT")
    shop.add("d", lambda: pay(), "DELETE")  # noqa: PLW0108 -- not the function that is decorated
    shop.add("c", lambda: pay(), "GET", "PUT")  # noqa: PLW0108 -- the same
    shop.add("read", lambda: pay(), "GET")  # noqa: PLW0108 -- the same
    assert not not_ok(shop.run("check"))
    said = "2 of 4 endpoints that change something are protected"
    assert shop.said("routes") == f"{said}; not protected: c, d"


def test_check_names_the_methods_of_a_class_that_are_not_protected(shop):
    class Both(MethodView):
        @idempotent
        def post(self):
            return {}, 201

        def patch(self):
            return {}, 201

        def put(self):
            return {}, 201

    shop.app.add_url_rule("/both", view_func=Both.as_view("both"))
    said = "1 of 1 endpoints that change something are protected; not protected: both (PATCH, PUT)"
    assert shop.said("routes") == said


def test_the_operators_page_is_not_among_the_routes_to_protect(shop):
    shop.add("pay", idempotent(pay))
    build_console(shop.app)
    assert shop.said("routes") == "1 of 1 endpoints that change something are protected"


def test_check_says_what_the_first_request_would_be_refused_for(shop):
    @idempotent
    @shop.app.post("/misplaced")
    def misplaced():
        return {}

    assert not_ok(shop.run("check")) == {"route": "FAILED"}
    assert (
        "misplaced, the view of the endpoint 'misplaced', is not protected by its @idempotent"
        in shop.said("route")
    )


@pytest.mark.parametrize("skip", [None, lambda _request: True])
def test_check_says_so_of_what_protect_covers_too(shop, skip):
    shop.idempotency.protect(shop.app, skip=skip)
    shop.add("misplaced", view := lambda: ({}, 201))
    idempotent(view)
    assert not_ok(shop.run("check")) == {"route": "FAILED"}
    assert "'misplaced', is not protected by its @idempotent" in shop.said("route")


@pytest.mark.parametrize("is_covered", [True, False])
def test_a_class_is_protected_by_its_dispatch(shop, is_covered):
    class Payments(View):
        @idempotent(ttl=60)
        def dispatch_request(self):
            return {}, 201

    if is_covered:
        shop.idempotency.protect(shop.app)
    shop.add("pay", Payments.as_view("pay"))
    assert not not_ok(shop.run("check"))
    assert shop.said("routes").startswith("1 of 1")


def test_check_looks_at_the_options_of_protect(shop):
    blueprint = Blueprint("api", __name__)
    shop.idempotency.protect(blueprint, other_binds=["logs"])
    for endpoint in "a", "b":
        shop.add(endpoint, lambda: pay(), target=blueprint)  # noqa: PLW0108 -- not the one decorated elsewhere
    shop.app.register_blueprint(blueprint)
    assert not_ok(shop.run("check")) == {"route": "FAILED"}
    assert "other_binds names 'logs'" in shop.said("route")


def test_check_misses_the_transactions_of_a_store(make_shop, redis_server):
    shop = make_shop(
        IDEMPOTENCY_STORE="redis",
        IDEMPOTENCY_REDIS_URL=redis_server.url,
        IDEMPOTENCY_REDIS_PREFIX="shop:",
    )
    shop.add("pay", idempotent(pay))
    shop.add("send", idempotent(atomic=False)(pay))
    assert not_ok(shop.run("check")).items() >= {("route", "FAILED")}
    assert shop.said("route").startswith("pay is atomic, which the store 'redis' cannot be")


def test_check_does_not_see_a_protection_that_a_decorator_hides(shop):
    shop.add("hidden", nameless(idempotent(lambda: ({}, 201))))
    assert "0 of 1 endpoints" in shop.said("routes")


def test_check_says_whose_keys_they_are(shop):
    assert shop.said("scope").startswith("one tenant")
    LoginManager(shop.app)
    assert not_ok(shop.run("check")) == {"scope": "advice"}
    assert "Flask-Login" in shop.said("scope")


def test_check_names_the_routes_that_all_tenants_share(make_shop):
    shop = make_shop(scope=tenant)
    shop.add("pay", idempotent(pay))
    assert findings(shop.run("check"))["scope"] == "ok"
    assert shop.said("scope").startswith(f"asked of {__name__}.tenant")
    shop.add("hook", idempotent(scope=None)(pay))
    assert "one tenant at hook" in shop.said("scope")


def tenant() -> str:
    return "acme"


def test_check_says_that_all_is_switched_off(make_shop):
    shop = make_shop(IDEMPOTENCY_ENABLED=False)
    shop.add("pay", idempotent(pay))
    assert not_ok(shop.run("check")) == {"routes": "advice"}
