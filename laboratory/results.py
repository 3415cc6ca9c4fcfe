"""A story played in both lanes, and what came of it by their books."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from example.seed import ALICE, BOB
from laboratory.client import Client, Exchange, Meeting, Moment
from laboratory.lanes import Lane, Row
from laboratory.stories import MANY, Story


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
    error: str = ""
    tally: Counter[str] = field(default_factory=Counter)

    @property
    def began(self) -> float:
        """What the time line counts from."""
        return self.moments[0].at

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
        if self.story.bob_pays and len(self.alices) == 1 and self.alices == self.bobs:
            return f"Alice and Bob each paid {money(self.alices[0])} once."
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
        want, _ = self.story.lanes[self.lane.name]
        charged = want if self.story.by_card else 0
        return books and not self.error and counts == (want, self.story.bob_pays, charged)

    @property
    def because(self) -> str:
        if self.is_as_told:
            return self.story.lanes[self.lane.name][1]
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
    try:
        story.run(client)
    except Exception as raised:
        meeting.give_up()
        error = f"{type(raised).__name__}: {raised}"
    after = read_books(lane)
    moments = sorted([*client.moments, *_in_the_shop(lane, client.story)], key=_when)
    result = Result(story, lane, before, after, _shortened(moments), client.exchanges, error)
    if len(client.exchanges) >= MANY:
        result.tally = _tally(client.exchanges)
    result.moments.append(_last(result))
    return result


def _when(moment: Moment) -> float:
    return moment.at


def _in_the_shop(lane: Lane, story: str) -> list[Moment]:
    return [
        Moment(
            event["at"],
            "demo" if event["what"] == "SIGKILL" else "shop",
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
    return Moment(time.time(), "counted", what, where)
