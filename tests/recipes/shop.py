"""Two shops under gunicorn to which a test dictates what goes wrong with each POST.

``api`` is paid by JSON, ``forms`` by the forms of ``docs/forms.md``, whose code it runs. The next
trouble is taken from the file that ``TROUBLES`` names.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any

import sqlalchemy as sa
from flask import Flask, g, render_template_string, request, session
from flask_sqlalchemy import SQLAlchemy
from flask_wtf.csrf import CSRFProtect, generate_csrf

from flask_idempotency import Idempotency, StoreUnavailable, idempotent
from tests.docs.pages import ROOT, blocks

LOCK = 1
"""The advisory lock for which a payment waits where it must be slow."""


def take_trouble() -> Any:
    """The first entry of the list in the file, which loses it; None at its end."""
    with open(os.environ["TROUBLES"], "r+", encoding="utf-8") as file:  # noqa: PTH123
        fcntl.flock(file, fcntl.LOCK_EX)
        trouble, *others = json.load(file) or [None]
        file.seek(0)
        file.truncate()
        json.dump(others, file)
    return trouble


class Troubles:
    """Does to a POST what its trouble says; a number is the status of somebody in front of the shop."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app = app

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "POST":
            return self.app(environ, start_response)
        environ["trouble"] = trouble = take_trouble()
        status = 200
        match trouble:
            case "request is lost":
                hang_up(environ)
            case "response is lost":
                self.run(environ)
                hang_up(environ)
            case "connection breaks, work goes on":
                # The body may come after the head, and would be lost with the connection.
                environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read())
                self.run(environ)  # which hangs up when its operation has begun: see meet
            case "worker dies after the commit":
                self.run(environ)
                os.kill(os.getpid(), signal.SIGKILL)
            case "gateway gives up":
                self.run(environ)
                status = 504
            case int():
                environ["wsgi.input"].read()
                status = trouble
            case _:
                return self.app(environ, start_response)
        return respond(start_response, status)

    def run(self, environ: dict[str, Any]) -> None:
        for _part in self.app(environ, lambda *_: None):
            pass


def hang_up(environ: dict[str, Any]) -> None:
    environ["gunicorn.socket"].shutdown(socket.SHUT_RDWR)


def respond(start_response: Callable[..., Any], status: int) -> list[bytes]:
    """As a proxy or a sign-in does, which know nothing of operations."""
    body = f'<h1>{status}</h1><script>{{"id": 1}}</script>'.encode()
    body = b"" if status in {202, 204} else body
    headers = [("Content-Length", str(len(body)))] if status != 204 else []
    headers += [("Location", "/")] if status == 303 else []
    start_response(f"{status} X", [*headers, ("Content-Type", "text/html")])
    return [body]


def shop() -> tuple[Flask, SQLAlchemy, Idempotency]:
    app, db = Flask("shop"), SQLAlchemy()
    app.config.update(SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"], SECRET_KEY="canary")
    db.init_app(app)
    app.before_request(sign_in)
    app.wsgi_app = Troubles(app.wsgi_app)  # type: ignore[method-assign]
    app.add_url_rule("/", "index", lambda: "open")
    return app, db, Idempotency(app, db, scope=lambda: g.account_id)


def create_tables(app: Flask, db: SQLAlchemy) -> None:
    """Before the workers begin, which must not inherit its connection."""
    with app.app_context():
        db.create_all()
        db.engine.dispose()


def sign_in() -> None:
    is_gone = request.environ.get("trouble") == "nobody is signed in"
    g.account_id = None if is_gone else request.headers.get("X-User", "alice")


def meet(db: SQLAlchemy) -> None:
    """What happens to a payment between its work and the operation's commit."""
    match request.environ["trouble"]:
        case "worker dies before the commit":
            os.kill(os.getpid(), signal.SIGKILL)
        case "connection breaks, work goes on":
            hang_up(request.environ)
            db.session.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
        case "view fails":
            raise RuntimeError
        case "database is away":
            raise StoreUnavailable


def api() -> Flask:
    app, db, _ = shop()
    columns = sa.Column("id", sa.Integer, primary_key=True), sa.Column("amount", sa.Integer)
    payment = sa.Table("payment", db.metadata, *columns)

    @app.post("/payments")
    @idempotent
    def create_payment() -> Any:
        asked = request.form or request.get_json()  # Stripe's SDK sends forms
        db.session.execute(sa.insert(payment).values(amount=int(asked["amount"])))
        db.session.commit()
        meet(db)
        return {"id": 1}, 201

    create_tables(app, db)
    return app


def forms() -> Flask:
    """The code of the page, and its form at ``/form``."""
    app, db, idempotency = shop()
    names = {"app": app, "db": db, "idempotency": idempotency, "idempotent": idempotent}
    page, recipes = ROOT / "docs/forms.md", ROOT / "example/recipes/form-pages.md"
    for block in [*blocks(page, "python"), *blocks(recipes, "python")]:
        if not block.mark:
            source = block.source.replace("wait=10", "wait=2")  # a duplicate need not be so patient
            exec(compile(source, block.name, "exec"), names)  # noqa: S102
    form, order_form = [block.text for block in blocks(page, "html")]
    app.add_url_rule("/form", "form", lambda: render_template_string(form))
    app.add_url_rule("/order-form", "order_form", lambda: render_template_string(order_form))
    app.add_url_rule("/payments", "payments", lambda: "<p>Your payments</p>")

    @sa.event.listens_for(db.session, "after_flush")
    def after_flush(*_: Any) -> None:
        meet(db)

    create_tables(app, db)
    return app


def csrf_forms() -> Flask:
    """The same with tokens, which end with the session; ``/sign-in`` begins another one."""
    app = forms()
    CSRFProtect(app)

    def order_form() -> str:
        session["user"] = "alice"
        return render_template_string(
            '<form method="post" action="/orders">{{ idempotency_field() }}'
            '<input type="hidden" name="csrf_token" value="{{ csrf_token() }}"><input name="amount">'
        )

    def sign_in_again() -> str:
        session.clear()
        return generate_csrf()

    app.add_url_rule("/csrf-form", "csrf_form", order_form)
    app.add_url_rule("/sign-in", "sign_in", sign_in_again)
    return app
