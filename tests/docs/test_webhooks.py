"""``docs/queues.md`` does what it says: its events are delivered, more than once."""

from __future__ import annotations

import hashlib
import hmac
import json

import pytest

from tests.docs.how_to import Page


class TestWebhooks:
    @pytest.fixture
    def shop(self, page) -> Page:
        return page("queues.md", "webhooks")

    def send(self, shop, path, event, secret=b"from the provider's dashboard"):
        body = json.dumps(event).encode()
        signature = hmac.new(secret, body, hashlib.sha256).hexdigest()
        headers = {"X-Signature": signature, "Content-Type": "application/json"}
        return shop.app.test_client().post(path, data=body, headers=headers)

    def event(self, number=1, **more):
        return {"id": f"evt_{number}", "type": "payment.succeeded", "payment": "pay_1", **more}

    @pytest.mark.parametrize(("path", "status"), [("payments", 204), ("refunds", 200)])
    def test_an_event_is_handled_once(self, shop, path, status):
        path = f"/webhooks/{path}"
        for delivery in range(3):
            event = self.event(delivery=delivery)  # a counter, as providers have it
            assert self.send(shop, path, event).status_code == status
        assert shop.count("booking") == 1
        assert self.send(shop, path, self.event(2)).status_code == status
        assert shop.count("booking") == 2

    @pytest.mark.parametrize("path", ["payments", "refunds"])
    def test_nobody_else_can_send_one(self, shop, path):
        path = f"/webhooks/{path}"
        assert self.send(shop, path, self.event(), secret=b"guessed").status_code == 401
        assert (shop.count("idempotency_record"), shop.count("booking")) == (0, 0)
        self.send(shop, path, self.event())
        assert self.send(shop, path, self.event(), secret=b"guessed").status_code == 401
