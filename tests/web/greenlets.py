"""One delivery of several events, handled in greenlets, in a process that gevent has patched.

The argument is the database. Writes what each event came to, delivered twice, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gevent import monkey

EVENTS = 4
TRIES = 2


def main(uri: str) -> dict[str, Any]:
    import gevent
    import sqlalchemy as sa
    from flask import Flask, copy_current_request_context
    from flask_sqlalchemy import SQLAlchemy

    from flask_idempotency import Idempotency, current_operation, operation_executed

    app, db = Flask("shop"), SQLAlchemy()
    app.config["SQLALCHEMY_DATABASE_URI"] = uri
    db.init_app(app)
    idempotency = Idempotency(app, db, scope=None)
    executed: list[str | None] = []
    charged: list[str] = []

    def charge(event: str) -> list[str]:
        operation = current_operation
        gevent.sleep(0.01)  # the others begin
        if operation.steps is not None:
            operation.step("charge", charged.append, event)
        else:
            operation.connection.execute(sa.select(1))
            charged.append(event)
        gevent.sleep(0.01)
        return [event, current_operation.key, current_operation.derive_key("charge")]

    def deliver(number: int, atomic: bool) -> list[Any]:
        def handle(event: str) -> Any:
            return idempotency.run(event, charge, event, name="charge", atomic=atomic)

        names = [f"{number}-{atomic}-{event}" for event in range(EVENTS)]
        found = [gevent.spawn(copy_current_request_context(handle), name) for name in names]
        gevent.joinall(found, timeout=20)
        return [greenlet.value for greenlet in found]

    app.post("/<int:number>/<int:atomic>")(lambda number, atomic: deliver(number, bool(atomic)))

    def note(_app: Flask, event: Any) -> None:
        executed.append(event.id)

    results = []
    with operation_executed.connected_to(note, app):
        for number in range(TRIES):
            for atomic in range(2):
                responses = [app.test_client().post(f"/{number}/{atomic}").json for _ in range(2)]
                results.append(responses)
    return {"results": results, "charged": charged, "executed": executed}


if __name__ == "__main__":
    monkey.patch_all()
    json.dump(main(sys.argv[1]), sys.stdout)
