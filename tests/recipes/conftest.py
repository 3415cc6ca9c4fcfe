"""Shops, the troubles that meet their customers, and a count of what they paid in the end."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, Request, g, request
from flask_sqlalchemy import SQLAlchemy

from flask_idempotency import Idempotency, StoreUnavailable
from tests.client.conftest import server, stopped  # noqa: F401 -- fixtures
from tests.killed import Killed
from tests.served import served
from tests.waiting import PATIENCE_SECONDS

TROUBLES = [
    "request is lost",
    "response is lost",
    "worker dies before the commit",
    "gateway gives up",
    "view fails",
    "nobody is signed in",
]


class Shop:
    """A shop to which a test dictates what goes wrong with the next POSTs: ``troubles``, one each.

    A number is the status of somebody in front of the shop, as a proxy, who knows no operations.
    """

    def __init__(self, database: str) -> None:
        self.app, self.db, self.url = Flask("shop"), SQLAlchemy(), ""
        self.app.config.update(SQLALCHEMY_DATABASE_URI=database, SECRET_KEY="canary")
        self.db.init_app(self.app)
        self.app.before_request(self.sign_in)
        self.idempotency = Idempotency(self.app, self.db, scope=lambda: g.account_id)
        self.work, self.app.wsgi_app = self.app.wsgi_app, self.meet  # type: ignore[method-assign]
        sa.event.listen(self.db.session, "after_flush", self.meet_in_view)
        self.troubles: list[Any] = []
        self.may_end = threading.Event()

    def sign_in(self) -> None:
        is_gone = request.environ["trouble"] == "nobody is signed in"
        g.account_id = None if is_gone else "alice"

    def meet(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        is_post = environ["REQUEST_METHOD"] == "POST"
        environ["trouble"] = trouble = self.troubles.pop(0) if is_post and self.troubles else None
        environ["wsgi.input"] = io.BytesIO(Request(environ).get_data())  # it arrives whole
        status = 504
        try:
            match trouble:
                case "request is lost":
                    hang_up(environ)
                case "response is lost":
                    list(self.work(environ, lambda *_: None))
                    hang_up(environ)
                case "gateway gives up":
                    list(self.work(environ, lambda *_: None))
                case int():
                    status = trouble
                case _:
                    return self.work(environ, start_response)
        except Killed:
            hang_up(environ)
        return respond(start_response, status)

    def meet_in_view(self, *_: Any) -> None:
        """Between a payment's work and the operation's commit."""
        match request.environ["trouble"]:
            case "worker dies before the commit":
                raise Killed
            case "connection breaks, work goes on":
                hang_up(request.environ)
                self.may_end.wait(PATIENCE_SECONDS)
            case "view fails":
                raise RuntimeError
            case "database is away":
                raise StoreUnavailable

    def sql(self, statement: str) -> list[Any]:
        with self.app.app_context(), self.db.engine.begin() as connection:
            result = connection.execute(sa.text(statement))
            return list(result) if result.returns_rows else []

    def payments(self) -> list[Any]:
        return self.sql("SELECT amount FROM payment")

    def emptied(self) -> Shop:
        """Itself, without troubles, payments and records."""
        self.troubles.clear()
        self.may_end.clear()
        self.sql("DELETE FROM payment; DELETE FROM idempotency_record")
        return self


def hang_up(environ: dict[str, Any]) -> None:
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def respond(start_response: Callable[..., Any], status: int) -> list[bytes]:
    """As a proxy or a sign-in does."""
    body = f'<h1>{status}</h1><script>{{"id": 1}}</script>'.encode()
    body = b"" if status == 204 else body
    headers = [("Content-Length", str(len(body)))] if status != 204 else []
    headers += [("Location", "/")] if status == 303 else []
    start_response(f"{status} X", [*headers, ("Content-Type", "text/html")])
    return [body]


@pytest.fixture(scope="module")
def start(postgres: Any) -> Iterator[Callable[..., Shop]]:
    """A function that opens a shop with what another one puts into it; they close with the module."""
    with ExitStack() as stack:

        def start(put_into: Callable[[Shop], None]) -> Shop:
            shop = Shop(postgres.database(f"recipes_{put_into.__name__}"))
            put_into(shop)
            with shop.app.app_context():
                shop.db.create_all()
                stack.callback(shop.db.engine.dispose)
            shop.url = stack.enter_context(served(shop.app))
            return shop

        yield start
