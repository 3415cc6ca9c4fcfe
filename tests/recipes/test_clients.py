"""The recipes of ``example/recipes``, as they stand there, pay once for one thing.

Each is a program that pays whenever it is told to; what it keeps is on disk.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from tests.recipes.conftest import TROUBLES as AT_WORK
from tests.recipes.conftest import Shop
from tests.recipes.programs import KEEP, KINDS, Recipe, orders
from tests.waiting import wait_until

TWO_DAYS = 48 * 3600
STRIPE = "stripe."

TROUBLES = [*AT_WORK, 200, 204, 303, 401, 404, 409, 413, 503]
"""A number is the status of something in front of the shop, which knows no keys."""


@dataclass
class Button:
    """What a user presses to pay for one order."""

    recipe: Recipe
    shop: Shop
    order: int

    def begin(self) -> None:
        more = {"more": {"deadline": 1500}} if self.recipe.name == "javascript" else {}
        self.recipe.begin(self.shop.url, self.order, **more)

    def press(self) -> tuple[str, Any]:
        """The outcome and the status that the recipe shows."""
        self.begin()
        paid = self.recipe.outcome()
        return paid["outcome"], paid["status"]

    def press_until_paid(self) -> list[tuple[str, Any]]:
        seen = [self.press()]
        while seen[-1][0] != "done":
            assert len(seen) < 20, seen
            seen.append(self.press())
        assert len(self.shop.payments()) == 1
        return seen

    def grow_old(self, seconds: float) -> None:
        """The notes were written so long ago."""
        for note in self.recipe.folder.iterdir():
            if note.suffix == ".json":
                kept = json.loads(note.read_text("utf-8"))
                for entry in kept.values():
                    entry["at"] -= seconds * 1000
                note.write_text(json.dumps(kept), "utf-8")
            if note.suffix == ".db":
                with closing(sqlite3.connect(note)) as notes, notes:
                    notes.execute("UPDATE note SET at = at - ?", [seconds])
            if note.suffix == ".key":
                then = note.stat().st_mtime - seconds
                os.utime(note, (then, then))


@pytest.fixture(scope="module")
def api(start) -> Shop:
    return start("api")


@pytest.fixture
def shop(api) -> Shop:
    return api.emptied()


@pytest.fixture(scope="module", params=[*KINDS, KEEP, STRIPE])
def recipe(request, tmp_path_factory):
    recipe = Recipe(request.param, tmp_path_factory.mktemp("recipe"))
    yield recipe
    recipe.end()


@pytest.fixture
def button(recipe, shop) -> Button:
    return Button(recipe, shop, next(orders))


@pytest.mark.parametrize("part", range(2))
def test_whatever_happens_after_a_lost_response_one_payment_is_made(button, shop, part):
    """The first attempt has paid; whoever then takes one of the responses for the end pays twice."""
    shop.meets("response is lost", *[each for each in TROUBLES[part::2] for _ in range(2)])
    button.press_until_paid()


def test_any_troubles_in_any_order_end_in_one_payment(button, shop):
    shop.meets(*random.Random(button.recipe.name).choices(TROUBLES, k=8))
    button.press_until_paid()
    assert button.press()[0] == "done"  # and one press more
    assert len(shop.payments()) == 1


def test_a_payment_that_outlasts_the_deadline_is_made_once(button, shop):
    with shop.slow():
        shop.meets("connection breaks, work goes on")
        outcome, status = button.press()
        assert outcome != "done"
        assert status in {409, None}
        assert shop.runs() == 1
    button.press_until_paid()


def test_a_client_that_is_killed_in_the_middle_comes_back_with_its_key(button, shop):
    with shop.slow():
        shop.meets("work is slow")
        button.begin()
        wait_until(shop.runs, "the payment runs")
        button.recipe.kill()
    button.recipe.start()
    button.press_until_paid()


@pytest.mark.parametrize("recipe", ["requests.", "curl", KEEP], indirect=True)  # tabs share no files
def test_programs_that_begin_at_the_same_moment_have_one_key(button, shop):
    others = [Recipe(button.recipe.name, button.recipe.folder) for _ in range(3)]
    for order in (next(orders) for _ in range(2)):
        together = [Button(each, shop, order) for each in (button.recipe, *others)]
        for each in together:
            each.begin()
        for each in together:
            each.recipe.outcome()
        together[0].press_until_paid()
        shop.emptied()
    for each in others:
        each.end()


@pytest.mark.parametrize("recipe", [*KINDS, KEEP], indirect=True)
def test_a_refused_payment_is_followed_by_another(button, shop):
    """A stored 402 would come for ever: so the next press has a new key."""
    shop.meets("request is lost", "card is declined")
    assert button.press_until_paid() == [("refused", 402), ("done", 201)]


@pytest.mark.parametrize("age", [TWO_DAYS, -TWO_DAYS])
def test_what_is_too_old_is_not_sent_again(button, shop, age):
    """The server has forgotten it, and would pay again. A clock that was ahead hides its age."""
    shop.meets("response is lost", *[503] * 99)
    button.press()
    shop.meets()
    button.grow_old(age)
    shop.sql("DELETE FROM idempotency_record")
    assert "find out" in button.press()[0]
    assert len(shop.payments()) == 1
