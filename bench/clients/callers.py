"""One call of one client, in a process of its own: ``python callers.py CLIENT URL CALLS``.

It needs nothing but Python and the client's package, which has an environment of its own. Prints what
came of the call, as JSON. More than one CALL is made in virtual time: nothing is waited for.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

BODY = {"card": "canary-of-the-body"}
QUERY = "?token=canary-of-the-query"

Call = Callable[[str], tuple[int, bool]]
"""Sends one POST to a URL. Returns the status, and whether there is a whole body with it."""


def ours_requests() -> Call:
    """As the page on clients has it."""
    from flask_idempotency.client import IdempotentSession

    api = IdempotentSession()
    return lambda url: _read(api.post(url, json=BODY))


def ours_httpx() -> Call:
    """As the page on clients has it."""
    from flask_idempotency.client import IdempotentClient

    client = IdempotentClient()
    return lambda url: _read(client.post(url, json=BODY))


def stripe() -> Call:
    """As its README has it; a ``StripeClient`` without this argument sends every call once."""
    import stripe

    def call(url: str) -> tuple[int, bool]:
        parts = urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}"
        client = stripe.StripeClient(
            "sk_test_canary", max_network_retries=2, base_addresses={"api": base}
        )
        params = {"amount": 500, "currency": "eur", "description": BODY["card"]}
        intent = client.v1.payment_intents.create(params)
        return intent.last_response.code, intent.id == "pi_1"

    return call


def botocore() -> Call:
    """The standard mode, its default. ``run_task`` takes a token, which it fills in by itself."""
    import botocore.session

    session = botocore.session.Session()
    session.set_credentials("AKIACANARY", "canary")

    clients: dict[str, Any] = {}

    def call(url: str) -> tuple[int, bool]:
        if url not in clients:  # each has a quota of retries
            clients[url] = session.create_client("ecs", "eu-central-1", endpoint_url=url)
        result = clients[url].run_task(taskDefinition=BODY["card"])
        return result["ResponseMetadata"]["HTTPStatusCode"], "tasks" in result

    return call


def requests_urllib3() -> Call:
    """The recipe of https://requests.readthedocs.io/en/latest/user/advanced/ ("Automatic Retries")."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.util import Retry

    session = requests.Session()
    retries = Retry(
        total=3, backoff_factor=0.1, status_forcelist=[502, 503, 504], allowed_methods={"POST"}
    )
    session.mount("http://", HTTPAdapter(max_retries=retries))
    return lambda url: _read(session.post(url, json=BODY, headers=_own_key()))


def stamina() -> Call:
    """The decorator with its defaults, as https://stamina.hynek.me/en/stable/tutorial.html has it."""
    import requests
    import stamina

    @stamina.retry(on=requests.RequestException)
    def post(url: str, headers: dict[str, str]) -> tuple[int, bool]:
        response = requests.post(url, json=BODY, headers=headers)  # noqa: S113 -- as it is shown there
        response.raise_for_status()
        return _read(response)

    return lambda url: post(url, _own_key())


def httpx_retries() -> Call:
    """Its defaults, but for the method: without that, a POST is sent once."""
    import httpx
    from httpx_retries import Retry, RetryTransport

    transport = RetryTransport(retry=Retry(allowed_methods=["POST"]))
    client = httpx.Client(transport=transport)
    return lambda url: _read(client.post(url, json=BODY, headers=_own_key()))


def _read(response: Any) -> tuple[int, bool]:
    return response.status_code, response.content.endswith(b"}")


def _own_key() -> dict[str, str]:
    """The caller's key for one call: these clients make none."""
    return {"Idempotency-Key": f"canary-of-the-key-{uuid.uuid4()}"}


class Lines(logging.Handler):
    """What is logged: everything from INFO on, and what tells of a retry below that."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line with all that was logged along with it."""
        text = f"{record.getMessage()} {vars(record)}"
        if record.levelno >= logging.INFO or "retr" in record.getMessage().lower():
            self.lines.append((record.levelname, record.name, text))


def _note_waits(*, skip: bool) -> list[float]:
    """The seconds of each sleep from now on. ``skip`` lets no time pass, but the clock shows it."""
    waits: list[float] = []
    sleep, monotonic = time.sleep, time.monotonic

    def noted(seconds: float) -> None:
        waits.append(seconds)
        if not skip:
            sleep(seconds)

    time.sleep = noted
    if skip:
        time.monotonic = lambda: monotonic() + sum(waits)
    return waits


def main() -> None:
    """The process."""
    client, url, calls = sys.argv[1], sys.argv[2] + QUERY, int(sys.argv[3])
    waits = _note_waits(skip=calls > 1)
    port, connects = urlsplit(url).port, []

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and arguments[1][1] == port:
            connects.append(time.monotonic())

    call = globals()[client]()
    sys.addaudithook(heard)
    lines = Lines()
    logging.basicConfig(level=logging.DEBUG, handlers=[lines])
    print("began", file=sys.stderr, flush=True)
    began = time.monotonic()
    for _ in range(calls):
        outcome = _outcome(call, url)
    seconds = time.monotonic() - began
    told = {"outcome": outcome, "seconds": seconds, "waited": sum(waits)}
    print(json.dumps({**told, "attempts": len(connects), "log": lines.lines}))


def _outcome(call: Call, url: str) -> str:
    try:
        status, is_whole = call(url)
        return f"{status}" if is_whole else f"{status} without a body"
    except Exception as error:
        return f"`{type(error).__name__}`"


if __name__ == "__main__":
    main()
