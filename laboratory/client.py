"""Alice's client in one lane of a story. It notes all it does, for the time line."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from example.seed import ALICE, DemoAccount
from laboratory.lanes import Lane
from laboratory.shops import FAULT, STORY

PATIENCE = 30  # seconds for one response, and for the other lane
TRIES = 30  # of one request
JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@dataclass
class Exchange:
    """A request, and the response to it, if one came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: str
    sent: float = 0
    done: float = 0
    status: int | None = None
    reason: str = ""
    answer_headers: list[tuple[str, str]] = field(default_factory=list)
    answer: str = ""
    error: str = ""

    def is_like(self, other: Exchange) -> bool:
        """Whether it is the same request, for all that the shop can see."""
        seen = [(each.path, each.body, each.headers.get("Authorization")) for each in (self, other)]
        return seen[0] == seen[1]

    def header(self, name: str) -> str | None:
        found = (value for key, value in self.answer_headers if key.lower() == name.lower())
        return next(found, None)

    @property
    def is_replay(self) -> bool:
        return self.header("Idempotent-Replayed") == "true"

    @property
    def is_final(self) -> bool:
        """Whether a client stops here. After anything else it has to send the request again."""
        if self.status is None or self.status >= 500:
            return False
        return not (self.status == 409 and self.header("Retry-After"))

    @property
    def outcome(self) -> str:
        """In a few words."""
        if self.status is None:
            return f"no response: {self.error}"
        told = self.header("Retry-After")
        more = ", replayed" if self.is_replay else f", wait {told} s" if told else ""
        return f"{self.status} {self.reason.title()}{more}"

    @property
    def milliseconds(self) -> int:
        return round((self.done - self.sent) * 1000)


@dataclass
class Moment:
    """Something that happened, and in whose hands."""

    at: float
    who: str
    what: str
    detail: str = ""


class Meeting:
    """Where the lanes of a story wait for each other, when something is done that concerns both."""

    def __init__(self, lanes: int) -> None:
        self._barrier = threading.Barrier(lanes)

    def together(self, act: Callable[[], object]) -> None:
        """Do it once, when all are here; returns when it is done."""
        if self._barrier.wait(PATIENCE) == 0:
            try:
                act()
            except BaseException:
                self._barrier.abort()
                raise
        self._barrier.wait(PATIENCE)

    def give_up(self) -> None:
        """Nobody is to wait any longer."""
        self._barrier.abort()


class Client:
    """Sends the requests of one lane."""

    def __init__(self, lane: Lane, meeting: Meeting, servers: Mapping[str, Any]) -> None:
        self.lane, self.servers = lane, servers
        self.story = uuid.uuid4().hex
        self.key = str(uuid.uuid4())
        self.moments: list[Moment] = []
        self.exchanges: list[Exchange] = []
        self._meeting = meeting

    def note(self, what: str, detail: str = "", who: str = "demo") -> None:
        self.moments.append(Moment(time.time(), who, what, detail))

    def together(self, what: str, act: Callable[[], object]) -> None:
        """Do something that concerns both lanes."""
        self._meeting.together(act)
        self.note(what)

    def give_up(self) -> None:
        self._meeting.give_up()

    def pay(
        self,
        amount: int = 12_50,
        *,
        who: DemoAccount = ALICE,
        fault: str | None = None,
        by_network: bool = False,
        silently: bool = False,
    ) -> Exchange:
        """``POST /payments`` with the key of this story."""
        body = json.dumps({"amount": amount, "description": "coffee beans"})
        headers = self._headers(who, fault)
        return self.send(
            "POST", "/payments", headers, body, by_network=by_network, silently=silently, by=who.name
        )

    def order(self, *, fault: str | None = None) -> Exchange:
        """``POST /orders``: one packet of coffee beans, paid by card."""
        body = json.dumps({"product": 1, "quantity": 1, "card": "4242424242424242"})
        return self.send("POST", "/orders", self._headers(ALICE, fault), body)

    def insist(self, request: Callable[[], Exchange]) -> Exchange:
        """Send it until there is a final response, as a client has to. It waits as it is told to."""
        exchange = request()
        for _ in range(TRIES):
            if exchange.is_final:
                break
            time.sleep(float(exchange.header("Retry-After") or 0))
            exchange = request()
        return exchange

    def _headers(self, who: DemoAccount, fault: str | None) -> dict[str, str]:
        return {
            "Authorization": f"Bearer {who.token}",
            **JSON,
            "Idempotency-Key": self.key,
            STORY: self.story,
            **({FAULT: fault} if fault else {}),
        }

    def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: str = "",
        *,
        by_network: bool = False,
        silently: bool = False,
        by: str = ALICE.name,
    ) -> Exchange:
        """One request on a connection of its own; ``by_network``: by the one that can be cut."""
        url = self.lane.network.url if by_network else self.lane.url
        exchange = Exchange(method, path, headers, body, sent=time.time())
        self.exchanges.append(exchange)
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, body or None, dict(headers))
                response = connection.getresponse()
                exchange.answer = response.read().decode()
                exchange.status, exchange.reason = response.status, response.reason
                exchange.answer_headers = response.getheaders()
            except (OSError, http.client.HTTPException) as error:
                exchange.error = "the connection was " + (
                    "reset" if isinstance(error, ConnectionError) else f"lost ({error})"
                )
        exchange.done = time.time()
        if not silently:
            first = next(each for each in self.exchanges if each.is_like(exchange))
            what = "request" if first is exchange else "retry"
            self.moments.append(Moment(exchange.sent, by, what, f"{method} {path}"))
            self.moments.append(Moment(exchange.done, by, exchange.outcome))
        return exchange


class Browser:
    """Alice's browser, as far as a form needs one: cookies, and the fields of a page."""

    def __init__(self, client: Client) -> None:
        self._client, self._cookies = client, dict[str, str]()

    def open(self, path: str) -> str:
        return self._go("GET", path).answer

    def submit(self, path: str, fields: Mapping[str, str], *, fault: str | None = None) -> Exchange:
        return self._go("POST", path, urlencode(fields), {FAULT: fault} if fault else {})

    def _go(
        self, method: str, path: str, body: str = "", more: Mapping[str, str] | None = None
    ) -> Exchange:
        cookies = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        headers = {"Cookie": cookies} if cookies else {}
        headers |= {**FORM} if body else {}
        headers |= {STORY: self._client.story, **(more or {})}
        exchange = self._client.send(method, path, headers, body, silently=True)
        for name, value in exchange.answer_headers:
            if name.lower() == "set-cookie":
                cookie, _, content = value.partition(";")[0].partition("=")
                self._cookies[cookie] = content
        return exchange


def fields_of(page: str) -> dict[str, str]:
    """The hidden fields of a page's form, the last of each name."""
    found = {}
    for tag in re.findall(r"<input[^>]*>", page):
        about = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        if about.get("type") == "hidden" and "name" in about:
            found[about["name"]] = about.get("value", "")
    return found
