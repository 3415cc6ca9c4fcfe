"""One request to a view whose lease of a second renews itself, in a process that can be stopped.

The arguments are the database, the folder in which files tell how far it is, and ``gevent`` for
greenlets. Writes the status of the response.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main(uri: str, folder: Path) -> int:
    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy

    from flask_idempotency import Idempotency, idempotent

    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = uri
    Idempotency(app, SQLAlchemy(app), scope=lambda: "alice")

    def charge() -> tuple[str, int]:
        (folder / "arrived").touch()
        while not (folder / "go_on").exists():
            time.sleep(0.01)
        return "", 201

    view = idempotent(atomic=False, lease=1, heartbeat=True)(charge)
    app.add_url_rule("/payments", "charge", view, methods=["POST"])
    headers = {"Idempotency-Key": "key-1", "X-User": "alice"}
    return app.test_client().post("/payments", headers=headers, json={"amount": 5}).status_code


if __name__ == "__main__":
    if sys.argv[3:] == ["gevent"]:
        from gevent import monkey

        monkey.patch_all()
    print(main(sys.argv[1], Path(sys.argv[2])))
