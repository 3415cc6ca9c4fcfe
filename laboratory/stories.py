"""The stories: what is sent and broken, and what each lane has to come to."""

from __future__ import annotations

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from example import checkout, orders, payments
from example.seed import ALICE, BOB
from laboratory import without
from laboratory.client import Browser, Client, Exchange, Meeting, Moment, fields_of
from laboratory.lanes import Lane, Row
from laboratory.shops import BE_SLOW, KILL_AFTER_CHARGE, KILL_AFTER_COMMIT

ROOT = Path(__file__).resolve().parent.parent
PRICE = 12_50
MANY = 200
MOST = MANY * PRICE  # what one story can move in one lane

Lanes = Mapping[str, Any]
"""Something for each lane, by the lane's name."""


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
    fields = fields_of(browser.open(path))
    client.exchanges.clear()  # what came before is no part of the story

    def click(number: int) -> None:
        client.note(f"click {number}", f"POST {path}", ALICE.name)
        client.note(
            browser.submit(path, fields, fault=BE_SLOW).outcome, f"to click {number}", ALICE.name
        )

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
    cable.lose_answer(b"state = 'completed'" if client.lane.is_protected else b"COMMIT")
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
    """One button.

    ``expected`` is how often Alice pays in each lane, and Bob in both. ``because`` says why, and is shown
    only if it came so.
    """

    name: str
    button: str
    told: str
    guarantees: tuple[str, ...]
    code: str
    run: Callable[[Client], None]
    expected: Mapping[str, int]
    because: Mapping[str, str]
    by_card: bool = False
    bob_pays: int = 0


@dataclass
class Books:
    """What a lane's books say at a moment."""

    balance: int
    payments: list[Row]
    charges: list[Row]
    records: list[Row]
    orders: list[Row]


def read_books(lane: Lane) -> Books:
    return Books(lane.balance(), lane.payments(), lane.charges(), lane.records(), lane.orders())


@dataclass
class Result:
    """A story in one lane."""

    story: Story
    lane: Lane
    before: Books
    after: Books
    moments: list[Moment]
    exchanges: list[Exchange]
    began: float
    error: str = ""
    tally: Counter[str] = field(default_factory=Counter)

    @property
    def payments(self) -> list[Row]:
        return self.after.payments[len(self.before.payments) :]

    @property
    def charges(self) -> list[Row]:
        return self.after.charges[len(self.before.charges) :]

    @property
    def orders(self) -> list[Row]:
        return self.after.orders[len(self.before.orders) :]

    @property
    def records(self) -> list[Row]:
        return self.after.records[len(self.before.records) :]

    def is_new(self, row: Row) -> bool:
        """Whether a row of a book was written in this story."""
        return row in self.payments or row in self.charges

    @property
    def alices(self) -> list[int]:
        """The amounts that Alice has paid."""
        if self.story.by_card:
            return [row["amount"] for row in self.charges]
        return [row["amount"] for row in self.payments if row["who"] == ALICE.name]

    @property
    def bobs(self) -> list[int]:
        return [row["amount"] for row in self.payments if row["who"] == BOB.name]

    @property
    def verdict(self) -> str:
        """What it came to, from the books."""
        said = _paid(ALICE.name, self.alices)
        return f"{said} {_paid(BOB.name, self.bobs)}" if self.story.bob_pays else said

    @property
    def kind(self) -> str:
        """``once``, ``twice`` (or more often) or ``never``, for the colour."""
        return "never" if not self.alices else "once" if len(self.alices) == 1 else "twice"

    @property
    def is_as_told(self) -> bool:
        books = self.before.balance - self.after.balance == sum(
            row["amount"] for row in self.payments if row["who"] == ALICE.name
        )
        counts = len(self.alices), len(self.bobs), len(self.charges)
        want = self.story.expected[self.lane.name]
        charged = want if self.story.by_card else 0
        return books and not self.error and counts == (want, self.story.bob_pays, charged)

    @property
    def because(self) -> str:
        if self.is_as_told:
            return self.story.because[self.lane.name]
        return f"This is not what the story tells; the time line shows why. {self.error}"


def money(cents: int) -> str:
    return f"{cents / 100:,.2f}"


_TIMES = {1: "once", 2: "twice"}


def _paid(who: str, amounts: list[int]) -> str:
    if not amounts:
        return f"{who} paid nothing."
    if len(amounts) == 1:
        return f"{who} paid {money(amounts[0])} once."
    times = _TIMES.get(len(amounts), f"{len(amounts)} times")
    return f"{who} paid {times}: {money(sum(amounts))}."


def play(story: Story, lanes: list[Lane], servers: Mapping[str, Any]) -> list[Result]:
    """Run it in all lanes at once."""
    meeting = Meeting(len(lanes))
    with ThreadPoolExecutor(len(lanes)) as pool:
        return list(pool.map(lambda lane: _play(story, lane, meeting, servers), lanes))


def _play(story: Story, lane: Lane, meeting: Meeting, servers: Mapping[str, Any]) -> Result:
    before, error = read_books(lane), ""
    client = Client(lane, meeting, servers)
    began = time.time()
    try:
        story.run(client)
    except Exception as raised:
        meeting.give_up()
        error = f"{type(raised).__name__}: {raised}"
    after = read_books(lane)
    moments = [*client.moments, *_in_the_shop(lane, client.story)]
    result = Result(
        story, lane, before, after, sorted(moments, key=_when), client.exchanges, began, error
    )
    if len(client.exchanges) >= MANY:
        result.tally = _tally(client.exchanges)
    result.moments = [*_shortened(result.moments), _last(result)]
    return result


def _when(moment: Moment) -> float:
    return moment.at


def _in_the_shop(lane: Lane, story: str) -> list[Moment]:
    return [
        Moment(
            event["at"],
            "laboratory" if event["what"] == "SIGKILL" else "shop",
            event["what"],
            event["detail"],
        )
        for event in lane.happened(story)
    ]


def _tally(exchanges: list[Exchange]) -> Counter[str]:
    """What they got, in the plural."""
    return Counter(
        "replays"
        if each.is_replay
        else "told to wait"
        if each.status == 409
        else "payments made"
        if each.status == 201
        else each.outcome
        for each in exchanges
    )


FEW = 4


def _shortened(moments: list[Moment]) -> list[Moment]:
    """Of what happened very often, the first and the last."""
    counts = Counter(moment.what for moment in moments)
    passed: Counter[str] = Counter()
    kept = []
    for moment in moments:
        passed[moment.what] += 1
        if counts[moment.what] <= FEW or passed[moment.what] == 1:
            kept.append(moment)
        elif passed[moment.what] == counts[moment.what]:
            kept.append(Moment(moment.at, moment.who, f"{moment.what}, the {counts[moment.what]}th"))
    return kept


def _last(result: Result) -> Moment:
    number = len(result.alices) + len(result.bobs)
    what = {0: "no row", 1: "one row", 2: "two rows"}.get(number, f"{number} rows")
    where = "in the provider's ledger" if result.story.by_card else "in the table of payments"
    return Moment(time.time(), "books", what, where)


@dataclass(frozen=True)
class Code:
    """The view that ran in a lane."""

    file: str
    text: str


_PROTECTED: dict[str, tuple[Any, ...]] = {
    "payments": (payments.pay, payments.make_payment),
    "checkout": (checkout.checkout,),
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


ONCE, TWICE = {"without": 1, "with": 1}, {"without": 2, "with": 1}

_EACH = (
    Story(
        "pay",
        "Pay",
        "Alice pays, and nothing goes wrong.",
        ("1", "2"),
        "payments",
        pay,
        ONCE,
        {
            "without": "As long as nothing breaks, there is no difference.",
            "with": "The payment and a record of its response are committed together.",
        },
    ),
    Story(
        "lost-response",
        "Lose the response",
        "Alice pays; the connection breaks before the response arrives, so her client sends the request"
        " again.",
        ("3",),
        "payments",
        lost_response,
        TWICE,
        {
            "without": "The first request had worked. The shop cannot know that the second is the same.",
            "with": "The retry has the same key, so it gets the stored response and nothing runs again.",
        },
    ),
    Story(
        "double-click",
        "Double-click",
        "Alice clicks twice on the checkout's button, and her browser sends the form twice.",
        ("1",),
        "checkout",
        double_click,
        TWICE,
        {
            "without": "Both forms are good, and each of them pays.",
            "with": "A hidden field is the form's key, so both clicks are one payment.",
        },
    ),
    Story(
        "stampede",
        f"{MANY} retries at once",
        f"{MANY} copies of one request arrive at once; whoever is told to wait asks again later.",
        ("1", "3"),
        "payments",
        stampede,
        {"without": MANY, "with": 1},
        {
            "without": "Each of them is a payment.",
            "with": "One pays. The others wait for it, and get its response.",
        },
    ),
    Story(
        "other-amount",
        "Same key, other amount",
        "Alice pays 12.50, and her client makes a mistake: it sends the same key with 99.00.",
        ("3",),
        "payments",
        other_amount,
        TWICE,
        {
            "without": "The shop does not look at the key, so both are paid.",
            "with": "The second request is another one, so it is refused (422) and moves nothing.",
        },
    ),
    Story(
        "kill-worker",
        "Kill the worker",
        "The worker is killed (SIGKILL) right after the view's commit, and the client retries.",
        ("1", "2", "4"),
        "payments",
        kill_worker,
        TWICE,
        {
            "without": "The first payment was committed when the worker died, so the retry is a second.",
            "with": "A payment is only committed together with its response, so the first one was undone;"
            " the retry paid.",
        },
    ),
    Story(
        "stop-redis",
        "Stop Redis",
        "Redis is stopped; Alice pays, the response is lost, and the client retries.",
        ("6",),
        "payments",
        stop_redis,
        TWICE,
        {
            "without": "This shop needs no Redis, but it pays again for the retry.",
            "with": "Redis only makes it faster; PostgreSQL knows the key, and the retry gets its response.",
        },
    ),
    Story(
        "restart-postgres",
        "Restart PostgreSQL",
        "PostgreSQL is restarted just after it has committed, before it can say so; the client gets an"
        " error and retries.",
        ("1", "2"),
        "payments",
        restart_postgres,
        TWICE,
        {
            "without": "The error looked as if nothing had happened, but the payment was committed; the retry"
            " is a second.",
            "with": "Payment and record were committed together, so the retry finds the response.",
        },
    ),
    Story(
        "bob",
        "Bob sends Alice's key",
        "Alice pays. Then Bob pays, and his request has Alice's key.",
        ("7",),
        "payments",
        bob,
        ONCE,
        {
            "without": "The same here: a shop that ignores keys cannot mix them up.",
            "with": "A key belongs to an account, so Bob gets his own payment and not Alice's response.",
        },
        bob_pays=1,
    ),
    Story(
        "provider-charged",
        "Kill it after a card charge",
        "Alice orders by card; the provider has charged it, and the worker is killed before it can note"
        " that. The client retries.",
        ("A", "C"),
        "orders",
        provider_charged,
        TWICE,
        {
            "without": "The retry is a new order, and so it is charged, too.",
            "with": "The retry goes on with the same order and sends the provider the same key, so there is"
            " one charge.",
        },
        by_card=True,
    ),
)

STORIES: Mapping[str, Story] = {story.name: story for story in _EACH}

__all__ = ["STORIES", "Result", "Story", "code_of", "money", "play"]
