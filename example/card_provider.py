"""A card provider to try the shop with, as a service of its own: ``example.card_provider:create_app()``.

No part of the shop, which knows it by ``PROVIDER_URL`` only. Like a real one it honours an
``Idempotency-Key`` if it gets one, keeps a ledger, and tells the shop what happened, again and again
until the shop has heard it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from typing import Any

import requests
from flask import Blueprint, Flask, abort, current_app, json, request
from flask.typing import ResponseReturnValue

DECLINED = "4000000000000002"  # every other card is good
TRIES = 10  # to tell the shop of an event, a second apart
TABLE = """
CREATE TABLE IF NOT EXISTS charge (
    id TEXT PRIMARY KEY, key TEXT UNIQUE, amount INTEGER, reference TEXT, created_at TEXT, refunded INTEGER
)"""
SHOWN = "SELECT id, amount, reference, created_at, refunded FROM charge"

blueprint = Blueprint("card_provider", __name__)


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """Configured by ``PROVIDER_DATABASE``, a path, and where to send events to, which is optional."""
    app = Flask(__name__)
    app.config.update(
        PROVIDER_DATABASE=os.environ.get("PROVIDER_DATABASE", "card_provider.db"),
        WEBHOOK_URL=os.environ.get("WEBHOOK_URL"),
        WEBHOOK_SECRET=os.environ.get("WEBHOOK_SECRET", ""),
    )
    app.config.update(config or {})
    app.register_blueprint(blueprint)
    with app.app_context(), ledger() as database:
        database.execute(TABLE)
    return app


@contextmanager
def ledger() -> Iterator[sqlite3.Connection]:
    """The ledger, on a connection of its own, committed at the end of the block."""
    with closing(sqlite3.connect(current_app.config["PROVIDER_DATABASE"], timeout=10)) as database:
        database.row_factory = sqlite3.Row
        with database:
            yield database


@blueprint.get("/")
def about() -> ResponseReturnValue:
    return {"service": "card provider"}


@blueprint.post("/charges")
def charge() -> ResponseReturnValue:
    """The same key gets the same charge. Without a key, each request is one."""
    body, key = request.get_json(), request.headers.get("Idempotency-Key")
    if body.get("card") == DECLINED:
        return {"error": "The card was declined."}, 402
    now = datetime.now(timezone.utc).isoformat()
    row = (f"ch_{secrets.token_hex(8)}", key, body["amount"], body["reference"], now)
    with ledger() as database:
        insert = "INSERT INTO charge VALUES (?, ?, ?, ?, ?, 0) ON CONFLICT (key) DO NOTHING"
        is_new = database.execute(insert, row).rowcount == 1
        found = dict(database.execute(f"{SHOWN} WHERE id = ? OR key = ?", row[:2]).fetchone())
    if is_new:
        tell("charge.succeeded", found)
    return found, 201


@blueprint.get("/charges")
def charges() -> ResponseReturnValue:
    """The ledger, or what is in it for one reference."""
    reference = request.args.get("reference")
    with ledger() as database:
        rows = database.execute(f"{SHOWN} WHERE ?1 IS NULL OR reference = ?1 ORDER BY rowid", (reference,))
        return [dict(row) for row in rows]


@blueprint.post("/charges/<charge_id>/refund")
def refund(charge_id: str) -> ResponseReturnValue:
    """Give a charge back, once."""
    with ledger() as database:
        update = "UPDATE charge SET refunded = 1 WHERE id = ? AND refunded = 0"
        is_new = database.execute(update, (charge_id,)).rowcount == 1
        found = database.execute(f"{SHOWN} WHERE id = ?", (charge_id,)).fetchone()
    if found is None:
        abort(404)
    if is_new:
        tell("charge.refunded", dict(found))
    return dict(found)


def tell(kind: str, about: dict[str, Any]) -> None:
    """Send a signed event to the shop, in the background."""
    url, secret = current_app.config["WEBHOOK_URL"], current_app.config["WEBHOOK_SECRET"]
    if url:
        body = json.dumps({"id": f"evt_{secrets.token_hex(8)}", "type": kind, "charge": about}).encode()
        headers = {"Content-Type": "application/json", "X-Signature": sign(secret, body)}
        threading.Thread(target=_deliver, args=(url, body, headers), daemon=True).start()


def sign(secret: str, body: bytes) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def _deliver(url: str, body: bytes, headers: dict[str, str]) -> None:
    for _ in range(TRIES):
        try:
            if requests.post(url, data=body, headers=headers, timeout=10).ok:
                return
        except requests.RequestException:
            pass  # the shop may be restarting
        time.sleep(1)
