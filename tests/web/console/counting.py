"""A process with a console that serves one request, and ends when its database has fallen silent.

The argument is the database. Writes a line when the request is done, and ends after one on its input.
"""

from __future__ import annotations

import sys


def main(uri: str) -> None:
    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy

    from flask_idempotency import Idempotency, idempotent

    app = Flask("shop")
    app.config.update(SQLALCHEMY_DATABASE_URI=uri, SECRET_KEY="secret")
    idempotency = Idempotency(app, SQLAlchemy(app), scope=None)
    app.register_blueprint(idempotency.console_blueprint(authorize=lambda: True))
    app.add_url_rule("/payments", "pay", idempotent(lambda: ("", 201)), methods=["POST"])
    response = app.test_client().post("/payments", headers={"Idempotency-Key": "key-1"})
    print(response.status_code, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
