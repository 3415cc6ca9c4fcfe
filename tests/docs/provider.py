"""A payment provider in another thread, which the pages' views call."""

from __future__ import annotations

from typing import Any

from flask import Flask, Response, request
from werkzeug.serving import make_server


class Provider:
    """A payment provider over HTTP. Its ledger has each charge that it made."""

    def __init__(self) -> None:
        self.deduplicates, self.refuses, self.loses, self.garbles = True, 0, 0, 0
        self.ledger: list[str] = []
        app = Flask("provider")
        app.add_url_rule("/charges", "charge", self.charge, methods=["POST"])
        app.add_url_rule("/charges", "find", self.find)
        app.add_url_rule("/bookings", "book", lambda: ({"booked": True}, 201), methods=["POST"])
        self.server = make_server("127.0.0.1", 0, app, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def charge(self) -> Any:
        if self.refuses:
            return {"refused": True}, self.refuses
        key = request.headers["Idempotency-Key"]
        if not (self.deduplicates and key in self.ledger):
            self.ledger.append(key)
        if self.loses:
            self.loses -= 1
            return Response(headers={"Content-Length": "100"})  # it breaks off
        if self.garbles:
            self.garbles -= 1
            return "<html>"
        return {"id": f"ch_{self.ledger.index(key)}"}

    def find(self) -> Any:
        key = request.args["reference"]
        return [{"id": f"ch_{self.ledger.index(key)}"}] if key in self.ledger else []
