"""Flask-HTTPAuth, -Login, -Security and -Session say whose request it is, of a replay, too."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import redis
from flask import session
from flask_httpauth import HTTPBasicAuth, HTTPTokenAuth
from flask_login import LoginManager, UserMixin, login_required, login_user
from flask_security import Security, SQLAlchemyUserDatastore, auth_required, current_user, hash_password
from flask_security.models import fsqla_v3
from flask_session import Session

from flask_idempotency import idempotent

BASIC, TOKEN = HTTPBasicAuth(), HTTPTokenAuth()


@BASIC.verify_password
def of_password(user: str, password: str) -> str | None:
    return user if password == f"{user}'s" else None


@TOKEN.verify_token
def of_token(token: str) -> str | None:
    return token.removesuffix("'s") if token.endswith("'s") else None


def with_httpauth(make_world: Any, place: str, auth: Any) -> Any:
    """``@login_required`` stands above ``@idempotent``, or below ``protect``."""
    asked = lambda: auth.authenticate(auth.get_auth(), None) or None  # noqa: E731
    world = make_world(
        init={"scope": auth.current_user if place == "decorator" else asked}, SECRET_KEY="tests only"
    )
    world.guard, world.user = auth.login_required, auth.current_user

    def client(user: str) -> Any:
        secret = user if user == "nobody" else f"{user}'s"
        basic = base64.b64encode(f"{user}:{secret}".encode()).decode()
        client = world.app.test_client()
        sent = f"Basic {basic}" if auth is BASIC else f"Bearer {secret}"
        client.environ_base["HTTP_AUTHORIZATION"] = sent
        return client

    world.of = client
    return world


def with_security(make_world: Any, place: str, _redis_server: Any) -> Any:
    """Its own views are left out."""
    world = make_world(
        init={"scope": lambda: current_user.fs_uniquifier if current_user.is_authenticated else None},
        SECRET_KEY="tests only",
        SECURITY_PASSWORD_SALT="1",
        SECURITY_PASSWORD_HASH="plaintext",
        SECURITY_PASSWORD_SCHEMES=["plaintext"],
        SECURITY_EMAIL_VALIDATOR_ARGS={"check_deliverability": False},
        WTF_CSRF_ENABLED=False,
    )
    fsqla_v3.FsModels.set_db_info(world.db)

    class Role(world.db.Model, fsqla_v3.FsRoleMixin):
        pass

    class User(world.db.Model, fsqla_v3.FsUserMixin):
        pass

    users = SQLAlchemyUserDatastore(world.db, User, Role)
    Security(world.app, users)
    if place == "protect":
        world.idempotency.exempt(world.app.blueprints["security"])
    with world.app.app_context():
        world.db.create_all()
        for name in "alice", "bob":
            users.create_user(email=f"{name}@example.com", password=hash_password("a long one"))
        world.db.session.commit()
    world.guard = auth_required("session")
    world.user = lambda: current_user.email.partition("@")[0]

    def client(user: str) -> Any:
        client = world.app.test_client()
        client.environ_base["HTTP_ACCEPT"] = "application/json"
        if user != "nobody":
            who = {"email": f"{user}@example.com", "password": "a long one"}
            client.post("/login", json=who)
        return client

    world.of = client
    return world


def with_session(make_world: Any, kind: str, redis_server: Any) -> Any:
    """Sessions on a server, also in the tables and the ``db.session`` of the shop itself."""
    world = make_world(
        init={"scope": lambda: session.get("user")},
        SESSION_TYPE=kind,
        SESSION_REDIS=redis.Redis.from_url(redis_server.url),
    )
    world.app.config["SESSION_SQLALCHEMY"] = world.db
    Session(world.app)
    world.guard, world.user = (lambda view: view), (lambda: session["user"])
    return with_sign_in(world, lambda user: session.update(user=user))


class User(UserMixin):
    def __init__(self, name: str) -> None:
        self.id = name


def with_login(make_world: Any, _place: str, _redis_server: Any) -> Any:
    """Flask-Login, and the session in a cookie."""
    world = make_world(init={"scope": lambda: current_user.get_id() or None}, SECRET_KEY="tests only")
    LoginManager(world.app).user_loader(User)
    world.guard, world.user = login_required, lambda: current_user.id
    return with_sign_in(world, lambda user: login_user(User(user)))


def with_sign_in(world: Any, sign_in: Any) -> Any:
    """A page on which anybody becomes anybody."""
    world.app.add_url_rule("/sign-in/<user>", "sign_in", lambda user: {"new": bool(sign_in(user))})

    def client(user: str) -> Any:
        client = world.app.test_client()
        if user != "nobody":
            client.get(f"/sign-in/{user}")
        return client

    world.of = client
    return world


SHOPS = {
    "httpauth basic": (with_httpauth, "decorator", BASIC),
    "httpauth token, protect": (with_httpauth, "protect", TOKEN),
    "security": (with_security, "decorator", None),
    "security, protect": (with_security, "protect", None),
    "login": (with_login, "decorator", None),
    "session redis": (with_session, "redis", None),
    "session sqlalchemy": (with_session, "sqlalchemy", None),
}


@pytest.fixture(params=SHOPS.values(), ids=SHOPS)
def shop(request: Any, make_world: Any, redis_server: Any) -> Any:
    make, place, auth = request.param
    world = make(make_world, place, auth or redis_server)

    def pay() -> Any:
        world.db.session.add(world.Payment(amount=5))
        session["paid"] = session.get("paid", 0) + 1
        world.db.session.commit()
        return {"by": world.user(), "paid": session["paid"]}, 201

    if place == "protect":
        world.idempotency.protect(world.app)
    view = world.guard(pay if place == "protect" else idempotent(pay))
    world.app.add_url_rule("/payments", "pay", view, methods=["POST"])
    yield world
    if make is with_session:
        world.app.config["SESSION_REDIS"].close()


def post(client: Any, key: str = "key-1") -> Any:
    return client.post("/payments", json={"amount": 5}, headers={"Idempotency-Key": key})


def test_each_user_has_keys_of_its_own_and_a_retry_changes_nothing(shop):
    for user in "alice", "bob":
        client = shop.of(user)
        first, replay = post(client), post(client)
        assert (first.status_code, first.json) == (201, {"by": user, "paid": 1})
        assert (replay.json, replay.headers["Idempotent-Replayed"]) == (first.json, "true")
        assert post(client, "key-2").json["paid"] == 2
    assert shop.count() == 4
    shop.assert_clean()


def test_who_is_not_let_in_sees_no_replay_and_stores_nothing(shop):
    assert post(shop.of("alice")).status_code == 201
    stranger = post(shop.of("nobody"))
    assert stranger.status_code == 401
    assert "Idempotent-Replayed" not in stranger.headers
    assert shop.count() == len(shop.records()) == 1
