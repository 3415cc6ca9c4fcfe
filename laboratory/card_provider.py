"""A card provider to try the shop with, a service of its own.

    gunicorn "laboratory.card_provider:create_app()"

Like a real one it honours an ``Idempotency-Key`` if it gets one, keeps a ledger, and tells the shop
what happened, again and again until the shop has heard it.
"""

import hashlib
import hmac
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from typing import Any

import requests
from flask import Blueprint, Flask, current_app, json, request
from flask.typing import ResponseReturnValue

DECLINED = "4000000000000002"  # every other card is good
TRIES = 10  # to tell the shop of an event, a second apart
COLUMNS = "id TEXT PRIMARY KEY, key TEXT UNIQUE, amount INTEGER, reference TEXT, created_at TEXT"
SHOWN = "SELECT id, amount, reference, created_at FROM charge"

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
        database.execute(f"CREATE TABLE IF NOT EXISTS charge ({COLUMNS})")
    return app


@contextmanager
def ledger() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(current_app.config["PROVIDER_DATABASE"], timeout=10)) as database:
        database.row_factory = sqlite3.Row
        with database:
            yield database


@blueprint.post("/charges")
def charge() -> ResponseReturnValue:
    """The same key gets the same charge. Without a key, each request is one."""
    body, key = request.get_json(), request.headers.get("Idempotency-Key")
    if body.get("card") == DECLINED:
        return {"error": "The card was declined."}, 402
    now = datetime.now(timezone.utc).isoformat()
    row = (f"ch_{secrets.token_hex(8)}", key, body["amount"], body["reference"], now)
    with ledger() as database:
        insert = "INSERT INTO charge VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING"
        is_new = database.execute(insert, row).rowcount == 1
        found = dict(database.execute(f"{SHOWN} WHERE id = ? OR key = ?", row[:2]).fetchone())
    url, secret = current_app.config["WEBHOOK_URL"], current_app.config["WEBHOOK_SECRET"]
    if is_new and url:
        event = {"id": f"evt_{found['id']}", "type": "charge.succeeded", "charge": found}
        threading.Thread(target=tell, args=(url, secret, json.dumps(event)), daemon=True).start()
    return found, 201


@blueprint.get("/")
@blueprint.get("/charges")
def charges() -> ResponseReturnValue:
    """The ledger, or what is in it for one reference."""
    asked = f"{SHOWN} WHERE :reference IS NULL OR reference = :reference ORDER BY rowid"
    with ledger() as database:
        values = {"reference": request.args.get("reference")}
        return [dict(row) for row in database.execute(asked, values)]


def tell(url: str, secret: str, event: str) -> None:
    """Send a signed event to the shop, until it has heard it."""
    signature = hmac.new(secret.encode(), event.encode(), hashlib.sha256).hexdigest()
    headers = {"Content-Type": "application/json", "X-Signature": signature}
    for _ in range(TRIES):
        with suppress(requests.RequestException):  # the shop may be restarting
            if requests.post(url, data=event, headers=headers, timeout=10).ok:
                return
        time.sleep(1)
