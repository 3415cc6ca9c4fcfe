"""The other side: a payment provider of our own, in a process of its own.

``python provider.py`` says its port in a line, and ends when its standard input does.

``POST /charges`` and ``POST /mails`` with a JSON ``{"order": …}`` have an effect, which goes into the
ledger. A second call with the same ``Idempotency-Key`` is given the first one's answer, and has none;
``X-Dedupe: off`` makes a provider that does not know such keys. ``X-Trouble`` is what goes wrong,
``before`` or ``after`` the effect: ``drop-…`` closes the connection, and ``hold-…`` takes until
somebody sends ``POST /go/<order>``.

``GET /find/<key>`` says what came of a call, ``GET /ledger`` gives all effects, ``GET /held`` the
orders that were held.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOLD_SECONDS = 20


class Dropped(Exception):
    """The connection is to be closed without an answer."""


ledger: list[dict[str, str]] = []
by_key: dict[str, dict[str, str]] = {}
gates: dict[str, threading.Event] = defaultdict(threading.Event)
lock = threading.Lock()


class Provider(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/ledger":
            self.answer(200, ledger)
        elif self.path == "/held":
            self.answer(200, list(gates))
        else:
            found = by_key.get(self.path.removeprefix("/find/"))
            self.answer(404 if found is None else 200, found)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.startswith("/go/"):
            gates[self.path.removeprefix("/go/")].set()
            self.answer(200, None)
            return
        order = json.loads(body)["order"]
        try:
            self.trouble("before", order)
            effect = self.take_effect(order)
            self.trouble("after", order)
            self.answer(200, effect)
        except Dropped:
            self.close_connection = True

    def take_effect(self, order: str) -> dict[str, str]:
        key = self.headers["Idempotency-Key"]
        with lock:
            if key in by_key and self.headers.get("X-Dedupe") != "off":
                return by_key[key]
            what = self.path[1:]
            effect = {"what": what, "order": order, "id": f"{what}-{len(ledger)}"}
            by_key[key] = effect
            ledger.append(effect)
            return effect

    def trouble(self, when: str, order: str) -> None:
        """Make the trouble that was asked for."""
        what, _, at = self.headers.get("X-Trouble", "").partition("-")
        if at == when and what == "drop":
            raise Dropped
        if at == when:
            gates[order].wait(HOLD_SECONDS)

    def answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle(self) -> None:
        with suppress(ConnectionError):  # who asked may have been killed meanwhile
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


def end_with_the_owner() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=end_with_the_owner, daemon=True).start()
        print(server.server_port, flush=True)
        server.serve_forever()
