"""The other side: a payment provider of our own, which knows nothing of the shop but its calls.

``POST /charges`` and ``POST /mails`` with a JSON ``{"order": …}`` have an effect, which goes into the
ledger. A second call with the same ``Idempotency-Key`` is given the first one's answer, and has none;
``X-Dedupe: off`` makes a provider that does not know such keys. ``X-Trouble`` is what goes wrong,
``before`` or ``after`` the effect: ``drop-…`` closes the connection, and ``hold-…`` takes until
its gate is open. ``GET /find/<key>`` says what came of a call.
"""

import json
import threading
from collections import defaultdict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOLD_SECONDS = 20


class Provider(ThreadingHTTPServer):
    """The running provider, and what it did."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Calls)
        self.effects: list[dict[str, str]] = []
        self.by_key: dict[str, dict[str, str]] = {}
        self.gates: dict[str, threading.Event] = defaultdict(threading.Event)  # of orders that are held
        self.lock = threading.Lock()

    def ledger(self, order):
        """How many charges and mails there were for an order."""
        made = [effect["what"] for effect in list(self.effects) if effect["order"] == order]
        return made.count("charges"), made.count("mails")


class Calls(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self):
        self.answer(self.server.by_key.get(self.path.removeprefix("/find/")))

    def do_POST(self):
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["order"]
        if not self.trouble("before", order):
            effect = self.take_effect(order)
            if not self.trouble("after", order):
                self.answer(effect)

    def take_effect(self, order):
        key, provider = self.headers["Idempotency-Key"], self.server
        with provider.lock:
            if key in provider.by_key and self.headers.get("X-Dedupe") != "off":
                return provider.by_key[key]
            what = self.path[1:]
            effect = {"what": what, "order": order, "id": f"{what}-{len(provider.effects)}"}
            provider.by_key[key] = effect
            provider.effects.append(effect)
            return effect

    def trouble(self, when, order):
        """Make the trouble that was asked for; whether nothing is to be answered."""
        what, _, at = self.headers.get("X-Trouble", "").partition("-")
        if at == when and what == "hold":
            self.server.gates[order].wait(HOLD_SECONDS)
        return at == when and what == "drop"  # the connection is closed without an answer

    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle(self):
        with suppress(ConnectionError):  # who asked may have been killed meanwhile
            super().handle()

    def log_message(self, *_):
        pass
