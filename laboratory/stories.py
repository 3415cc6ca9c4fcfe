"""The stories: what is sent and broken, and what it has to come to in each lane."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from example import checkout, orders, payments
from example.seed import ALICE, BOB
from laboratory import without
from laboratory.client import Browser, Client, Exchange, fields_of
from laboratory.shops import BE_SLOW, KILL_AFTER_CHARGE, KILL_AFTER_COMMIT

ROOT = Path(__file__).resolve().parent.parent
PRICE = 12_50
MANY = 200
MOST = MANY * PRICE  # what one story can move in one lane


def pay(client: Client) -> None:
    client.insist(client.pay)


def lost_response(client: Client) -> None:
    client.lane.network.lose_answer(b"POST /payments")
    client.pay(by_network=True)
    client.insist(client.pay)


def double_click(client: Client) -> None:
    browser = Browser(client)
    fields = fields_of(browser.open("/login"))
    browser.submit("/login", {**fields, "name": ALICE.name, "password": ALICE.password})
    path = "/checkout/1"
    fields = {**fields_of(browser.open(path)), "quantity": "1"}
    client.exchanges.clear()  # what came before is no part of the story

    def click(number: int) -> None:
        client.note(f"click {number}", f"POST {path}", ALICE.name)
        outcome = browser.submit(path, fields, fault=BE_SLOW).outcome
        client.note(outcome, f"to click {number}", ALICE.name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(click, (1, 2)))


def stampede(client: Client) -> None:
    start = threading.Barrier(MANY)

    def request(_: int) -> Exchange:
        start.wait()
        return client.insist(lambda: client.pay(fault=BE_SLOW, silently=True))

    client.note(f"{MANY} requests at once", "POST /payments", ALICE.name)
    with ThreadPoolExecutor(MANY) as pool:
        list(pool.map(request, range(MANY)))
    client.note("every request has its response", who=ALICE.name)


def other_amount(client: Client) -> None:
    client.insist(client.pay)
    client.insist(lambda: client.pay(99_00))


def kill_worker(client: Client) -> None:
    client.pay(fault=KILL_AFTER_COMMIT)
    client.insist(client.pay)


def stop_redis(client: Client) -> None:
    redis = client.servers["redis"]
    client.together("Redis is stopped", redis.stop)
    try:
        lost_response(client)
    finally:
        client.together("Redis is started", redis.start)


def restart_postgres(client: Client) -> None:
    """PostgreSQL goes away between a commit and its answer, the one moment in which nobody knows."""
    cable = client.lane.cable
    lost = cable.lost
    cable.lose_answer(b"COMMIT\0")  # the last word of a message: a claim's has a semicolon
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.pay)
        while cable.lost == lost and not first.done():
            time.sleep(0.001)
        client.note("PostgreSQL has committed, and its answer is lost")
        client.together("PostgreSQL is restarted", client.servers["postgres"].restart)
    client.insist(client.pay)


def bob(client: Client) -> None:
    client.insist(client.pay)
    client.insist(lambda: client.pay(who=BOB))


def provider_charged(client: Client) -> None:
    client.order(fault=KILL_AFTER_CHARGE)
    client.insist(client.order)


@dataclass(frozen=True)
class Story:
    """One button. ``lanes`` says of each how often Alice pays there, and why."""

    name: str
    button: str
    told: str
    guarantees: tuple[str, ...]
    run: Callable[[Client], None]
    lanes: Mapping[str, tuple[int, str]]
    code: str = "payments"
    by_card: bool = False
    bob_pays: int = 0


def lanes(without: tuple[int, str], protected: tuple[int, str]) -> Mapping[str, tuple[int, str]]:
    return {"without": without, "with": protected}


_EACH = (
    Story(
        "pay",
        "Pay",
        "Alice pays, and nothing goes wrong.",
        ("1", "2"),
        pay,
        lanes(
            (1, "While nothing breaks, there is no difference."),
            (1, "The payment and its response were committed together, under the request’s key."),
        ),
    ),
    Story(
        "lost-response",
        "Lose the response",
        "Alice pays; the connection breaks before the response arrives, so her app sends the request"
        " again.",
        ("3",),
        lost_response,
        lanes(
            (
                2,
                "The first request had already paid; the shop cannot tell that the second is a retry.",
            ),
            (1, "The retry carries the same key, so it got the stored response; nothing ran again."),
        ),
    ),
    Story(
        "double-click",
        "Double-click",
        "Alice clicks twice on the checkout’s button, and her browser sends the form twice.",
        ("1",),
        double_click,
        lanes(
            (2, "Both forms are valid, and each one paid."),
            (1, "A hidden field is the form’s key, so both clicks are one payment."),
        ),
        code="checkout",
    ),
    Story(
        "stampede",
        f"{MANY} retries at once",
        f"{MANY} copies of one request arrive at once; whoever is told to wait asks again later.",
        ("1", "3"),
        stampede,
        lanes(
            (MANY, "Each request was a payment."),
            (1, "One request paid; all others got its response."),
        ),
    ),
    Story(
        "other-amount",
        "Same key, different amount",
        "Alice pays 12.50; then her app makes a mistake, and sends 99.00 with the same key.",
        ("1",),
        other_amount,
        lanes(
            (2, "This shop ignores the key, so it paid both amounts."),
            (1, "The key stands for 12.50, so the request for 99.00 was refused and moved nothing."),
        ),
    ),
    Story(
        "kill-worker",
        "Kill the worker",
        "The worker is killed (SIGKILL) right after the view’s commit, and Alice’s app retries.",
        ("1", "2", "4"),
        kill_worker,
        lanes(
            (2, "The first payment was already committed when the worker died; the retry paid again."),
            (1, "A payment commits only with its response: the first was undone, and the retry paid."),
        ),
    ),
    Story(
        "stop-redis",
        "Stop Redis",
        "Redis is stopped; Alice pays, the response is lost, and her app retries.",
        ("6",),
        stop_redis,
        lanes(
            (2, "This shop uses no Redis, and its retry pays again as it always does."),
            (
                1,
                "Redis only saves time: PostgreSQL knows the key, so the retry got its response.",
            ),
        ),
    ),
    Story(
        "restart-postgres",
        "Restart PostgreSQL",
        "PostgreSQL commits, and is restarted before it can say so; Alice’s app gets an error, and"
        " retries.",
        ("1", "2"),
        restart_postgres,
        lanes(
            (
                2,
                "The error looked like a failure, but the payment was committed; the retry paid again.",
            ),
            (1, "Payment and response were committed together, so the retry found the response."),
        ),
    ),
    Story(
        "bob",
        "Bob sends Alice’s key",
        "Alice pays. Then Bob pays, and his request carries Alice’s key.",
        ("7",),
        bob,
        lanes(
            (1, "No difference here: a shop that ignores keys cannot mix them up."),
            (
                1,
                "A key belongs to an account: Bob got a payment of his own, not Alice’s response.",
            ),
        ),
        bob_pays=1,
    ),
    Story(
        "provider-charged",
        "Kill the worker after a card charge",
        "Alice orders by card; the provider has charged it, and the worker is killed before it can note"
        " that. Her app retries.",
        ("No recorded step", "A late writer"),
        provider_charged,
        lanes(
            (2, "The retry was a new order, with a charge of its own."),
            (1, "The retry continued the same order and sent the provider the same key: one charge."),
        ),
        code="orders",
        by_card=True,
    ),
)

STORIES: Mapping[str, Story] = {story.name: story for story in _EACH}


@dataclass(frozen=True)
class Code:
    """The view that ran in a lane."""

    file: str
    text: str


_PROTECTED: dict[str, tuple[Any, ...]] = {
    "payments": (payments.pay, payments.make_payment),
    "checkout": (checkout.buy,),
    "orders": (orders.create,),
}


def code_of(story: Story, lane: str) -> Code:
    """What ran. Without the extension it is the same view without its decorator, or another one."""
    if lane == "without" and story.code == "orders":
        return _source(without.create_order)
    code = _source(*_PROTECTED[story.code])
    if lane == "without":
        lines = [line for line in code.text.splitlines() if not line.startswith("@idempotent")]
        return Code(code.file, "\n".join(lines))
    return code


def _source(*functions: Any) -> Code:
    plain = [inspect.unwrap(function) for function in functions]
    file = Path(inspect.getsourcefile(plain[0]) or "").relative_to(ROOT)
    return Code(str(file), "\n\n".join(inspect.getsource(each).rstrip() for each in plain))
