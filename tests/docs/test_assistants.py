"""``example/recipes/assistants.md``, and ``llms.txt``: the code runs, the links lead to pages."""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import responses

from tests.docs.pages import RECIPES, ROOT, blocks, commands, looks_like
from tests.docs.reference import extension
from tests.docs.test_tutorials import PLUGIN, Shell

DOCS = ROOT / "docs"
PAGE = RECIPES / "assistants.md"
MOST_BYTES = 16_000
"""Of ``llms.txt``: about four thousand tokens, so that it can be read whole before any work."""


def files() -> dict[str, str]:
    """The files that the page's reader writes, by name."""
    found: dict[str, str] = {}
    for block in blocks(PAGE, "python"):
        kind, _, name = block.mark.partition(": ")
        if kind in {"file", "append"}:
            found[name] = found.get(name, "") + "\n\n" * (kind == "append") + block.text
    return found


class TestLlmsTxt:
    @pytest.fixture
    def llms(self) -> Any:
        return extension("llms")

    @pytest.fixture
    def text(self, llms) -> str:
        return llms.llms_txt(DOCS)

    def test_it_has_the_form_of_llmstxt_org(self, text):
        """A title, a summary, text without headings, lists of links under headings."""
        outside = re.sub(r"(?ms)^```.*?^```$", "", text)
        title, summary = outside.split("\n\n")[:2]
        assert title == "# Flask-Idempotency"
        assert re.fullmatch(r"> .+\.", summary)
        headings = re.findall(r"(?m)^#+ .*", outside)
        assert headings == [title, *(line for line in headings if line.startswith("## "))]
        for section in outside.split("\n## ")[1:]:
            lines = section.strip().splitlines()[2:]
            assert lines
            assert all(re.fullmatch(r"- \[[^\]]+\]\([^)]+\.md\)(: .+)?", line) for line in lines)

    def test_it_links_to_every_page_once_and_to_nothing_else(self, llms, text):
        listed = llms.links(text[text.index("\n## ") :])
        assert sorted(listed) == sorted(
            str(page.relative_to(DOCS))
            for page in DOCS.glob("**/*.md")
            if page.relative_to(DOCS).parts[0] not in {"figures", "_build"}
        )
        assert all((DOCS / link).is_file() for link in llms.links(text))

    def test_it_has_all_code_for_assistants(self, text):
        for block in blocks(PAGE, "python", "console"):
            if block.language == "console" or block.mark.startswith(("file: ", "append: ")):
                assert f"```{block.language}\n{block.text}```" in text

    def test_it_can_be_read_whole(self, text):
        assert len(text.encode()) < MOST_BYTES

    def test_nothing_of_sphinx_is_left_in_it(self, text):
        assert not re.search(r"^:::|^```\{|\{[a-z:]+\}`|<!--|^\(.*\)=$", text, re.MULTILINE)


def test_the_page_has_at_most_800_words_beside_its_code():
    text = re.sub(r"(?ms)^(`{3,}).*?^\1$|<!--.*?-->", "", PAGE.read_text(encoding="utf-8"))
    assert len(text.split()) <= 800


class TestItsTest:
    @pytest.fixture
    def run(self, tmp_path) -> Iterator[Callable[..., str]]:
        """Runs the page's test as its reader does, on these files."""
        shell = Shell(tmp_path, port="0", **PLUGIN)

        def run(**changed: str) -> str:
            for name, text in {**files(), **changed}.items():
                (tmp_path / name).write_text(text, encoding="utf-8")
            return shell.type("pytest -q --tb=line -p no:cacheprovider test_shop.py")

        yield run
        shell.close()

    def test_it_passes(self, run):
        [shown] = [shown for block in blocks(PAGE, "console") if not block.mark
                   for _, shown in commands(block.text)]  # fmt: skip
        assert looks_like(run(), shown)

    @pytest.mark.parametrize(
        ("protected", "mistake"),
        [
            ("@idempotent\n", ""),
            ("scope=lambda: g.account)", "scope=None)"),
            ("db.session.commit()  #", "db.session.flush(); db.engine.raw_connection().commit()  #"),
            ('operation.derive_key("charge")', "str(operation.attempt)"),
            ("amount, atomic=True", "amount"),
        ],
    )
    def test_it_fails_for_a_mistake(self, run, protected, mistake):
        shop = files()["shop.py"]
        assert shop.count(protected) == 1
        assert re.search(r"(?m)^\d failed", run(**{"shop.py": shop.replace(protected, mistake)}))


class TestItsCode:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch) -> Iterator[Any]:
        for name, text in files().items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(str(tmp_path))
        yield tmp_path
        for name in "shop", "caller":
            sys.modules.pop(name, None)

    @pytest.fixture
    def shop(self, folder) -> Any:
        return importlib.import_module("shop")

    @pytest.fixture
    def app(self, shop, postgres, redis_server, probing_at_once) -> Iterator[Any]:
        app = shop.create_app(
            SQLALCHEMY_DATABASE_URI=postgres.database("docs_assistants"),
            IDEMPOTENCY_REDIS_URL=redis_server.url,
        )
        with app.app_context():
            shop.db.create_all()
            yield app
            shop.db.session.remove()
            shop.db.engine.dispose()

    def post(self, app, path="/charges") -> Any:
        headers = {"Authorization": "Bearer alice-token", "Idempotency-Key": "order-7"}
        return app.test_client().post(path, json={"amount": 500}, headers=headers)

    @responses.activate
    @pytest.mark.parametrize("failure", [requests.ConnectionError(), 503])
    def test_a_provider_that_does_not_answer_is_asked_again_with_the_same_key(self, app, failure):
        url = "https://provider.example/charges"
        if isinstance(failure, int):
            responses.post(url, status=failure)
        else:
            responses.post(url, body=failure)
        responses.post(url, json={"id": "ch_1"})
        answers = [self.post(app) for _ in range(3)]
        assert [each.status_code for each in answers] == [503, 201, 201]
        assert len({call.request.headers["Idempotency-Key"] for call in responses.calls}) == 1
        assert len(responses.calls) == 2

    @responses.activate
    def test_a_declined_card_stays_declined(self, app):
        responses.post("https://provider.example/charges", status=402)
        assert [self.post(app).status_code for _ in range(2)] == [402, 402]
        assert len(responses.calls) == 1

    def test_an_event_is_booked_once_and_nobody_else_can_send_one(self, app, shop):
        event = {"id": "evt_1", "account": "alice", "amount": 5}

        def deliver(secret: bytes, **more: Any) -> int:
            body = json.dumps({**event, **more}).encode()
            headers = {"X-Signature": hmac.new(secret, body, hashlib.sha256).hexdigest()}
            post = app.test_client().post
            send = {"data": body, "headers": headers, "content_type": "application/json"}
            return post("/webhooks/payments", **send).status_code

        assert [deliver(b"the provider's secret", delivery=n) for n in range(3)] == [204] * 3
        assert deliver(b"guessed") == 401
        assert deliver(b"the provider's secret", amount=6) == 422
        assert shop.db.session.query(shop.Payment).count() == 1

    @responses.activate
    @pytest.mark.usefixtures("folder")
    def test_the_client_sends_the_same_key_again(self):
        caller, url = importlib.import_module("caller"), "https://api.example/payments"
        responses.post(url, body=requests.ConnectionError())
        responses.post(url, json={"id": 1}, headers={"Idempotent-Replayed": "true"})
        assert caller.pay(url, "alice-token", 500, "order-7") == ({"id": 1}, True)
        sent = [call.request.headers["Idempotency-Key"] for call in responses.calls]
        assert [key.strip('"') for key in sent] == ["order-7"] * 2
