"""The other side: a payment provider of our own, which knows nothing of the shop but its calls.

``POST /charges`` and ``POST /mails`` with a JSON ``{"order": …}`` have an effect, which goes into the
ledger. A second call with the same ``Idempotency-Key`` is given the first one's answer, and has none;
``X-Dedupe: off`` makes a provider that does not know such keys. ``X-Trouble`` is what goes wrong,
``before`` or ``after`` the effect: ``drop-…`` closes the connection, and ``hold-…`` takes until
its gate is open. ``GET /find/<key>`` says what came of a call.
"""

import socket
import threading
from collections import defaultdict

from flask import Flask, jsonify, request

HOLD_SECONDS = 20


class Provider:
    """The provider's application, and what it did."""

    def __init__(self):
        self.effects: list[dict[str, str]] = []
        self.by_key: dict[str, dict[str, str]] = {}
        self.gates: dict[str, threading.Event] = defaultdict(threading.Event)  # of orders that are held
        self.lock = threading.Lock()
        self.app = Flask("provider")
        self.app.add_url_rule("/find/<key>", "find", lambda key: jsonify(self.by_key.get(key)))
        self.app.add_url_rule("/<what>", "call", self.call, methods=["POST"])

    def ledger(self, order):
        """How many charges and mails there were for an order."""
        made = [effect["what"] for effect in list(self.effects) if effect["order"] == order]
        return made.count("charges"), made.count("mails")

    def call(self, what):
        order = request.get_json()["order"]
        self.trouble("before", order)
        effect = self.take_effect(what, order)
        self.trouble("after", order)
        return jsonify(effect)

    def take_effect(self, what, order):
        key = request.headers["Idempotency-Key"]
        with self.lock:
            if key not in self.by_key or request.headers.get("X-Dedupe") == "off":
                effect = {"what": what, "order": order, "id": f"{what}-{len(self.effects)}"}
                self.by_key[key] = effect
                self.effects.append(effect)
            return self.by_key[key]

    def trouble(self, when, order):
        """Make the trouble that was asked for."""
        what, _, at = request.headers.get("X-Trouble", "").partition("-")
        if at == when and what == "hold":
            self.gates[order].wait(HOLD_SECONDS)
        if at == when and what == "drop":
            request.environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError
