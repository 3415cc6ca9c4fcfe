"""Flask-HTTPAuth: it is in front of each request, a replay, too, and the scope is whom it found."""

from __future__ import annotations

from typing import Any

import pytest
from flask_httpauth import HTTPBasicAuth, HTTPTokenAuth

from flask_idempotency import idempotent

BASIC, TOKEN = HTTPBasicAuth(), HTTPTokenAuth()
SCHEMES = pytest.mark.parametrize("auth", [BASIC, TOKEN], ids=["basic", "token"])


@BASIC.verify_password
def of_password(user: str, password: str) -> str | None:
    return user if password == f"{user}'s" else None


@TOKEN.verify_token
def of_token(token: str) -> str | None:
    return token.removesuffix("'s") if token.endswith("'s") else None


def caller(auth: Any) -> str | None:
    """Whose request it is, wherever that is asked; None for nobody."""
    sent = auth.get_auth()
    return auth.authenticate(sent, None) or None


def post(world: Any, auth: Any, user: str, ending: str = "'s") -> Any:
    sent = {"auth": (user, user + ending)} if auth is BASIC else {}
    headers = {} if sent else {"Authorization": f"Bearer {user}{ending}"}
    return world.post(headers=headers, **sent)


@pytest.fixture(params=["decorator", "protect"])
def shop(request: Any, make_world: Any, auth: Any) -> Any:
    """The view has ``@login_required``: above ``@idempotent``, or below ``protect``."""
    if request.param == "decorator":
        world = make_world(init={"scope": auth.current_user})
    else:
        world = make_world(init={"scope": lambda: caller(auth)})
        world.idempotency.protect(world.app)

    def pay() -> Any:
        world.db.session.add(world.Payment(amount=5))
        world.db.session.commit()
        return {"by": auth.current_user()}, 201

    view = idempotent(pay) if request.param == "decorator" else pay
    world.app.add_url_rule("/payments", "pay", auth.login_required(view), methods=["POST"])
    return world


@SCHEMES
def test_each_user_has_keys_of_its_own_and_a_retry_pays_once(shop, auth, assert_replayed):
    for user in "alice", "bob":
        first = post(shop, auth, user)
        assert (first.status_code, first.json) == (201, {"by": user})
        assert_replayed(first, post(shop, auth, user))
    assert shop.count() == 2


@SCHEMES
def test_who_is_not_let_in_sees_no_replay_and_stores_nothing(shop, auth):
    post(shop, auth, "alice")
    stranger = post(shop, auth, "alice", "?")
    assert stranger.status_code == 401
    assert "Idempotent-Replayed" not in stranger.headers
    assert shop.count() == len(shop.records()) == 1
