"""``docs/protect.md`` does what it says: whose key it is, with each way of authentication."""

from __future__ import annotations

import hashlib

import pytest
from flask import session
from flask_jwt_extended import create_access_token

from tests.docs.how_to import Page

PATHS = ("/api/payments", "/shop/payments", "/partners/orders")


class TestAuthentication:
    @pytest.fixture
    def shop(self, page) -> Page:
        shop = page("protect.md", "authentication")

        @shop.app.get("/sign-in/<user>")
        def sign_in(user):
            session["user_id"] = user
            return {}

        return shop

    def client(self, shop, path, who):
        """A client with the credentials of somebody that this path asks for."""
        client = shop.app.test_client()
        if path.startswith("/api"):
            with shop.app.app_context():
                token = create_access_token(who)
            client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {token}"
        elif path.startswith("/shop"):
            client.get(f"/sign-in/{who}")
        else:
            hashed = hashlib.sha256(who.encode()).hexdigest()
            shop.sql(f"INSERT INTO partner (hashed_key) VALUES ('{hashed}')")
            client.environ_base["HTTP_X_API_KEY"] = who
        return client

    def post(self, client, path):
        return client.post(path, json={}, headers={"Idempotency-Key": "key-1"})

    @pytest.mark.parametrize("path", PATHS)
    def test_each_caller_has_keys_of_its_own(self, shop, path):
        answers = {}
        for who in "alice", "bob":
            client = self.client(shop, path, who)
            first, again = (self.post(client, path) for _ in range(2))
            assert (first.status_code, "Idempotent-Replayed" in first.headers) == (201, False)
            assert (again.json, again.headers["Idempotent-Replayed"]) == (first.json, "true")
            answers[who] = first.json
        assert answers["alice"] != answers["bob"]

    @pytest.mark.parametrize("path", PATHS)
    def test_nobody_gets_a_401_and_no_replay(self, shop, path):
        self.post(self.client(shop, path, "alice"), path)
        stranger = self.post(shop.app.test_client(), path)
        assert stranger.status_code == 401
        assert shop.count("idempotency_record") == 1
