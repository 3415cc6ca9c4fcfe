"""The code for clients pays once for one thing: that of ``docs/clients.md``, and the recipes.

Each recipe of ``example/recipes`` is a program that pays whenever it is told to; what it keeps is on
disk. It meets a real shop in trouble, and a server that does what its script says.
"""

from __future__ import annotations

import json
import os
import random
import sqlite3
from contextlib import closing

import pytest
import sqlalchemy as sa
from flask import request

from flask_idempotency import idempotent
from tests.client.conftest import break_off, drop_after, drop_before, hang, respond, written
from tests.recipes.conftest import TROUBLES as AT_WORK
from tests.recipes.programs import API, KEEP, KINDS, Recipe, blocks, orders
from tests.waiting import wait_until

SOON = {"more": {"deadline": 900}}
"""So long JavaScript tries. In the others' time only their waits count, which take none."""
EACH = pytest.mark.parametrize("recipe", [*KINDS, KEEP, "stripe."], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def recipe(request, tmp_path_factory):
    recipe = Recipe(request.param, tmp_path_factory.mktemp("recipe"))
    yield recipe
    recipe.end()


@pytest.fixture
def order() -> int:
    return next(orders)


@pytest.fixture
def pay(recipe, server, order):
    """Pays for the same order each time; the outcome and what else the recipe shows."""
    return lambda url=server.url, **more: recipe.pay(url, order, **more)


def pay_until_done(pay, *url):
    """The outcomes and statuses that the recipe shows."""
    seen = [pay(*url)]
    while seen[-1]["outcome"] != "done":
        assert len(seen) < 20, seen
        seen.append(pay(*url))
    return [(paid["outcome"], paid["status"]) for paid in seen]


@pytest.fixture(scope="module")
def shop(start):
    return start(payments_by_json)


def payments_by_json(shop):
    class Payment(shop.db.Model):
        id = sa.Column(sa.Integer, primary_key=True)
        amount = sa.Column(sa.Integer)

    @shop.app.post("/payments")
    @idempotent
    def create_payment():
        asked = request.form or request.get_json()  # Stripe's SDK sends forms
        shop.db.session.add(Payment(amount=int(asked["amount"])))
        shop.db.session.commit()
        return {"id": 1}, 201


@EACH
def test_whatever_happens_in_a_real_shop_after_a_lost_response_one_payment_is_made(recipe, pay, shop):
    """The first attempt has paid; whoever then takes one of the responses for the end pays twice.

    A number is the status of something in front of the shop, which knows no keys.
    """
    shop.emptied()
    troubles = [*AT_WORK, 200, 204, 303, 401, 404, 409, 413, 503]
    random.Random(recipe.name).shuffle(troubles)
    shop.troubles += ["response is lost", *[each for each in troubles for _ in range(2)]]
    while shop.troubles:
        pay_until_done(pay, shop.url)
    assert len(shop.payments()) == 1


@EACH
@pytest.mark.parametrize("ends", [(503, ""), (409, "request-in-progress")])
def test_the_deadline_ends_it_and_leaves_the_key(recipe, pay, server, ends):
    """Also of a payment that outlasts it."""
    server.script += [*[drop_after] * (ends[0] == 409), *[respond(*ends)] * 999]
    paid = pay(**SOON)
    assert paid["outcome"] != "done"
    assert paid["status"] in {ends[0], None}
    assert len(server.seen) > 2
    if recipe.name in KINDS:
        assert paid["outcome"] == "again"
        assert paid.get("waits", [1, 2, 4, 8, *[10] * 7]) == [1, 2, 4, 8, *[10] * 7]
    server.script.clear()
    pay_until_done(pay)
    assert len(set(server.keys)) == len(server.done) == 1


@EACH
def test_a_client_that_is_killed_in_the_middle_comes_back_with_its_key(recipe, pay, server, order):
    server.script += [hang]
    recipe.begin(server.url, order)
    wait_until(lambda: server.done, "the payment is made")
    recipe.kill()
    recipe.start()
    pay_until_done(pay)
    assert len(set(server.keys)) == len(server.done) == 1


@pytest.mark.parametrize("recipe", ["requests.", "curl", KEEP], indirect=True)  # tabs share no files
def test_programs_that_begin_at_the_same_moment_have_one_key(recipe, server):
    others = [Recipe(recipe.name, recipe.folder) for _ in range(3)]
    for order in (next(orders) for _ in range(2)):
        for each in (recipe, *others):
            each.begin(server.url, order)
        assert [each.outcome()["outcome"] for each in (recipe, *others)] == ["done"] * 4
        assert len(set(server.keys)) == 1
        server.seen.clear()
    for each in others:
        each.end()


@pytest.mark.parametrize("recipe", [*KINDS, KEEP], indirect=True)
def test_a_refused_payment_is_followed_by_another(pay, server):
    """A stored 402 would come for ever: so the next press has a new key."""
    server.script += [drop_before, respond(402), respond(402, Idempotent_Replayed="true")]
    assert pay_until_done(pay) == [("refused", 402), ("done", 201)]
    assert len(set(server.keys)) == 2


@EACH
@pytest.mark.parametrize("days", [2, -2])
def test_what_is_too_old_is_not_sent_again(recipe, pay, server, days):
    """The server may have forgotten it, and pay again. A clock that was ahead hides its age."""
    server.script += [drop_after, *[respond(503)] * 99]
    pay(**SOON)
    grow_old(recipe.folder, days * 24 * 3600)
    server.seen.clear()
    assert "find out" in pay()["outcome"]
    assert server.seen == []


def grow_old(folder, seconds):
    """The notes in it were written so long ago."""
    for note in folder.iterdir():
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


def test_its_python_pays_once_each_time(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_PROXY", "*")
    names: dict[str, object] = {}
    examples = blocks("python", "docs/clients.md")
    examples[-1:-1] = blocks("python", "example/recipes/keep-the-key.md")
    for text in examples:
        if "api.example.com" in text:
            server.script += [drop_after]
        with pytest.MonkeyPatch.context() as quick:
            quick.setattr("flask_idempotency.client.attempts.random", lambda: 0.0)  # no wait
            exec(text.replace(API, server.url), names)  # noqa: S102
    paid = sum("api.example.com" in text for text in examples)
    assert paid == len(server.done) == len(set(server.done)) == len(server.seen) / 2
    assert server.done[-2] == (tmp_path / "order-7.key").read_text()
    assert server.done[-1] == names["key"]
    names["api"].close()
    names["client"].close()


def broken_gzip(handler):
    """A body that cannot be read, after its head: in Node.js 20 fetch itself would never end."""
    handler.send_response(502)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", "17")
    handler.end_headers()
    handler.world.let_go.wait(0.05)
    handler.wfile.write(b"<h1>Not gzip</h1>")


TROUBLES = [
    [drop_before, drop_after, break_off],
    [respond(409, "request-in-progress", Retry_After="60")],
    [respond(400), respond(503, "store-unavailable")],
    # A proxy's page that cannot be read, or only looks like a problem.
    [broken_gzip],
    [lambda handler: handler.respond(502, {}, b"[" * 100_000 + b"]" * 100_000)],
    [lambda handler: handler.respond(502, {}, b'{"type": {"toString": 1}}')],
    [lambda handler: handler.respond(502, {}, b"null")],
    [written("HTTP/1.1 502 X\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabc")],
]
FINAL = [
    (respond(401), "sign in"),
    (respond(409, "operation-interrupted"), "find out"),
    (respond(500, "operation-failed"), "find out"),
    (respond(503, Idempotent_Replayed="true"), "find out"),
    (respond(400, "key-malformed"), "bug"),
    (respond(422, "key-reused"), "bug"),
    (respond(503, Retry_After="9" * 5000), "again"),
]
NOT_OURS = [
    lambda handler: handler.respond(202, {"x-amzn-waf-action": "challenge"}, b""),
    lambda handler: handler.respond(200, {"Content-Type": "text/html"}, b"<h1>Welcome</h1>"),
    lambda handler: handler.respond(201, {"Content-Type": "text/html"}, b'<script>{"id": 1}</script>'),
    lambda handler: handler.respond(201, {}, b"5"),
    lambda handler: handler.wfile.write(b"HTTP/1.1 204 NO CONTENT\r\n\r\n"),
    lambda handler: handler.respond(303, {"Location": "/", "Idempotent-Replayed": "true"}, b""),
    respond(404),
]
"""What a firewall, a captive portal or a sign-in says, and a success that looks like theirs."""
DATED = respond(503, Retry_After="Fri, 01 Jan 2038 00:00:30 GMT")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_each_recipe_sends_the_same_key_again(pay, server, trouble):
    server.script += trouble
    paid = pay()
    assert (paid["outcome"], paid["status"]) == ("done", 201)
    assert server.done == [server.keys[0]]
    assert server.keys == server.done * (len(trouble) + 1)
    assert json.loads(server.seen[0].body)["amount"] == 500


@pytest.mark.parametrize(("final", "outcome"), FINAL)
def test_it_does_not_repeat_a_final_response(pay, server, final, outcome):
    server.script += [final]
    assert pay()["outcome"] == outcome
    assert len(server.seen) == 1


@pytest.mark.parametrize("answer", NOT_OURS)
def test_what_does_not_look_like_a_success_is_asked_for_once_more(pay, server, answer):
    server.script += [answer] * 2
    assert pay()["outcome"] == "unclear"
    assert [seen.method for seen in server.seen] == ["POST"] * 2
    assert pay()["outcome"] == "done"
    assert len(set(server.keys)) == 1


@pytest.mark.parametrize("recipe", KINDS[:3], indirect=True)
def test_python_waits_as_long_as_it_is_told_but_not_for_a_date(pay, server):
    server.script += [DATED, respond(429, Retry_After="60")]
    assert pay()["waits"] == [1, 60]
    server.script += [respond(429, Retry_After="100")]
    assert pay()["outcome"] == "again"


@pytest.mark.parametrize("recipe", ["curl"], indirect=True)
class TestCurl:
    def test_it_waits_twice_as_long_each_time_and_no_less_than_it_is_told(self, pay, server):
        server.script += [respond(503), respond(429, Retry_After="7"), *[DATED] * 2]
        server.script += [respond(409, "request-in-progress"), DATED]
        assert pay()["waits"] == [1, 7, 4, 8, 10, 10]

    @pytest.mark.parametrize("framing", ["Content-Length: 2", "Transfer-Encoding: chunked"])
    @pytest.mark.parametrize("end", [24, 60, -4])
    def test_one_that_breaks_off_in_its_headers_is_none(self, pay, server, framing, end):
        head = f"HTTP/1.1 201 CREATED\r\nIdempotent-Replayed: true\r\n{framing}\r\nX: y\r\n"
        server.script += [written(head[:end])]
        assert pay()["outcome"] == "done"
        assert len(server.seen) == 2

    def test_an_earlier_response_is_not_taken_for_the_last_one(self, pay, server):
        bare = lambda handler: handler.respond(409, {}, b"")  # noqa: E731
        server.script += [respond(409, "request-in-progress"), bare, bare]
        paid = pay()
        assert (paid["outcome"], paid["size"]) == ("unclear", len("409\n"))


@pytest.mark.parametrize("recipe", ["javascript"], indirect=True)
def test_javascript_waits_for_a_date_and_notes_the_key_until_a_refusal(pay, server):
    server.script += [DATED]
    assert pay()["outcome"] == "again"
    server.script += [respond(503, Retry_After="Fri, 01 Jan 2021 00:00:30 GMT")]
    assert pay()["noted"] == server.keys[0]
    server.script += [respond(402, Idempotent_Replayed="true")]
    assert "noted" not in pay()
