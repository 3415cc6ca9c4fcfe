"""Flask-Security: its own views are left out, its session and its tokens say whose key it is."""

from __future__ import annotations

from typing import Any

import pytest
from flask_security import (
    Security,
    SQLAlchemyUserDatastore,
    auth_required,
    current_user,
    hash_password,
)
from flask_security.models import fsqla_v3

from flask_idempotency import idempotent

JSON = {"Accept": "application/json"}


def caller() -> str | None:
    """Whose request it is: by session or by token."""
    return current_user.fs_uniquifier if current_user.is_authenticated else None


@pytest.fixture(params=["decorator", "protect"])
def shop(request: Any, make_world: Any) -> Any:
    world = make_world(
        init={"scope": caller},
        SECRET_KEY="tests only",
        SECURITY_PASSWORD_SALT="1",
        SECURITY_PASSWORD_HASH="plaintext",
        SECURITY_PASSWORD_SCHEMES=["plaintext"],
        SECURITY_TRACKABLE=True,
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

    def pay() -> Any:
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {"by": current_user.email}, 201

    if request.param == "protect":
        world.idempotency.protect(world.app)
        world.idempotency.exempt(world.app.blueprints["security"])
        view = pay
    else:
        view = idempotent(pay)
    world.app.add_url_rule(
        "/payments", "pay", auth_required("session", "token")(view), methods=["POST"]
    )
    with world.app.app_context():
        world.db.create_all()
        for name in "alice", "bob":
            users.create_user(email=f"{name}@example.com", password=hash_password("a long one"))
        world.db.session.commit()
    return world


def sign_in(shop: Any, name: str) -> Any:
    """A client with the session; the token is in the answer."""
    client = shop.client
    who = {"email": f"{name}@example.com", "password": "a long one"}
    client.token = client.post("/login?include_auth_token", json=who).json["response"]["user"][
        "authentication_token"
    ]
    return client


def post(client: Any, **headers: str) -> Any:
    headers = {"Idempotency-Key": "key-1", **JSON, **headers}
    return client.post("/payments", json={"amount": 5}, headers=headers)


def test_who_has_signed_in_has_keys_of_its_own(shop):
    for name in "alice", "bob":
        client = sign_in(shop, name)
        first, replay = post(client), post(client)
        assert (first.status_code, first.json) == (201, {"by": f"{name}@example.com"})
        assert (replay.json, replay.headers["Idempotent-Replayed"]) == (first.json, "true")
    assert shop.count() == 2
    assert shop.sql('select login_count from "user"') == [(1,), (1,)]
    shop.assert_clean()


def test_the_token_of_the_user_finds_the_keys_of_its_session(shop):
    client = sign_in(shop, "alice")
    assert post(client).status_code == 201
    elsewhere = post(shop.client, **{"Authentication-Token": client.token})
    assert elsewhere.headers["Idempotent-Replayed"] == "true"
    assert shop.count() == 1


def test_after_signing_out_there_is_no_replay(shop):
    client = sign_in(shop, "alice")
    post(client)
    client.post("/logout")
    answer = post(client)
    assert answer.status_code == 401
    assert "Idempotent-Replayed" not in answer.headers
    assert len(shop.records()) == shop.count() == 1
