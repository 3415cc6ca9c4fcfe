"""What ``flask idempotency check`` says of the routes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Blueprint, Flask
from flask.views import MethodView, View
from flask_login import LoginManager
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, idempotent
from tests.integration.commands.running import build_console, findings, not_ok, runner
from tests.stores import on_sqlite


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
    said = "2 of 4 endpoints that change something are protected, 1 of them by protect()"
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


def test_check_misses_the_key_that_signs_the_forms_of_the_operators_page(shop):
    build_console(shop.app)
    shop.app.secret_key = None
    result = shop.run("check")
    assert not_ok(result)["console"] == "FAILED"
    assert "-> set SECRET_KEY" in result.output
    shop.app.secret_key = "secret"
    assert "console" not in not_ok(shop.run("check"))


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


def test_check_names_what_is_exempt_and_protected(shop):
    shop.add("pay", idempotent(pay))
    shop.idempotency.exempt("pay")
    assert not_ok(shop.run("check")) == {"route": "FAILED"}


def test_check_does_not_see_a_protection_that_a_decorator_hides(shop):
    shop.add("hidden", nameless(idempotent(lambda: ({}, 201))))
    assert "0 of 1 endpoints" in shop.said("routes")


def make_blueprint() -> Blueprint:
    return Blueprint("api", __name__)


def test_check_misses_a_blueprint_that_is_protected(shop):
    blueprint = make_blueprint()
    shop.idempotency.protect(blueprint)
    assert not_ok(shop.run("check")) == {"protect": "FAILED"}
    assert "another one" not in shop.said("protect")
    shop.app.register_blueprint(make_blueprint())
    assert "'api', which is not registered: another one of this name is" in shop.said("protect")


def test_check_knows_the_other_applications_of_the_extension(shop):
    """A blueprint is registered in one of them, and is no mistake in the other."""
    blueprint, other = make_blueprint(), Flask("other")
    other.config.update(on_sqlite(other))
    shop.idempotency.init_app(other, SQLAlchemy(other), scope=None)
    shop.idempotency.protect(blueprint)
    shop.idempotency.exempt("there")
    other.register_blueprint(blueprint)
    shop.add("there", pay, target=other)
    assert not not_ok(shop.run("check"))


@pytest.fixture
def package(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A package as it is installed, with a view that takes a form."""
    folder = tmp_path / "site-packages" / "backoffice_of_others"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("def save():\n    return {}, 201\n")
    monkeypatch.syspath_prepend(folder.parent)
    yield __import__(folder.name)
    del sys.modules[folder.name]


@pytest.mark.parametrize("cure", [None, "skip", "exempt", "not required"])
def test_check_advises_on_views_of_other_packages_that_protect_has_caught(shop, package, cure):
    shop.add("office", package.save)
    shop.add("pay", lambda: pay())  # noqa: PLW0108 -- not the function that is decorated elsewhere
    options = {"skip": {"skip": bool}, "not required": {"required": False}}.get(cure, {})
    shop.idempotency.protect(shop.app, **options)
    if cure == "exempt":
        shop.idempotency.exempt("office")
    assert not_ok(shop.run("check")) == ({} if cure else {"protect": "advice"})
    if cure is None:
        assert shop.said("protect").startswith(
            "protect() covers views of backoffice_of_others, which send no key: office -> leave them"
        )


def test_check_says_whose_keys_they_are(shop):
    assert shop.said("scope").startswith("one tenant")
    LoginManager(shop.app)
    assert not_ok(shop.run("check")) == {"scope": "advice"}
    assert "Flask-Login" in shop.said("scope")


def test_check_names_the_routes_that_all_tenants_share(make_shop):
    shop = make_shop(scope=tenant)
    shop.add("pay", idempotent(pay))
    assert findings(shop.run("check"))["scope"] == "ok"
    assert shop.said("scope").startswith(f"asked of {__name__}.tenant, not tried below @idempotent")
    shop.add("hook", idempotent(scope=None)(pay))
    assert "one tenant at hook" in shop.said("scope")


def tenant() -> str:
    return "acme"


def test_check_says_that_all_is_switched_off(make_shop):
    shop = make_shop(IDEMPOTENCY_ENABLED=False)
    shop.add("pay", idempotent(pay))
    assert not_ok(shop.run("check")) == {"routes": "advice"}
