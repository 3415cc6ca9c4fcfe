"""What the pages show."""

import re
from urllib.parse import quote

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

import servers
from flask_idempotency import Idempotency

HTML = "<b>pay</b>&amp;"


def pay(world, key="key-1", amount=5):
    return world.post("/payments", key, json={"amount": amount})


def run(world, name, key="key-1"):
    with world.app.app_context():
        world.idempotency.run(key, dict, scope="alice", name=name)


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.text).split())


def digits_in(text):
    return re.findall(r'class="digits" href="/operations/records/([0-9a-f]{16})"', text)


def test_the_overview_of_nothing_says_so(browser):
    text = browser.get().text
    assert "nothing stopped midway" in text


def test_the_overview_counts_records_by_operation_and_state(browser, world, interrupted):
    pay(world)
    pay(world)
    pay(world, "key-2")
    interrupted()
    text = text_of(browser.get())
    assert re.search(r"Records +3 +counted", text)
    assert re.search(r"Operation +interrupted +completed", text)
    assert re.search(r"charge +1 +interrupted of charge +·", text)
    assert re.search(r"pay +· +2 +completed of pay", text)


def test_the_overview_leads_to_what_was_interrupted(browser, interrupted):
    digits = interrupted()
    page = browser.get()
    assert "stopped midway, the oldest" in page.text
    assert "wait for you" not in page.text, "a retry may run it again without anybody's doing"
    assert digits_in(page.text) == [digits]
    assert browser.get(f"/records/{digits}").status_code == 200


def test_the_newest_comes_first(browser, interrupted):
    first, second = interrupted("one"), interrupted("two")
    for page in "/", "/records?state=interrupted":
        assert digits_in(browser.get(page).text) == [second, first]


def test_the_list_shows_one_operation_or_state(browser, world, interrupted):
    pay(world)
    run(world, "refund")
    interrupted()
    assert len(digits_in(browser.get("/records").text)) == 3
    assert len(digits_in(browser.get("/records?operation=pay").text)) == 1
    assert len(digits_in(browser.get("/records?state=completed").text)) == 2
    assert "There is no such record" in browser.get("/records?operation=pay&state=failed").text
    assert len(digits_in(browser.get("/records?state=&operation=").text)) == 3


def test_a_state_that_is_none_is_refused_by_name(browser):
    for state in "weird", "%00", "Completed":
        response = browser.get(f"/records?state={state}")
        assert response.status_code == 404
        assert "the states are in_progress, completed, failed, interrupted" in response.text


def test_a_long_list_says_that_there_are_more(browser, world, monkeypatch):
    for number in range(3):
        pay(world, f"key-{number}")
    monkeypatch.setattr("flask_idempotency.console.pages.PAGE", 2)
    for page in browser.get("/records?operation=pay"), browser.post("/records", scope="alice"):
        assert len(digits_in(page.text)) == 2
        assert "These are 2, and there are more" in text_of(page)
    monkeypatch.setattr("flask_idempotency.console.pages.PAGE", 3)
    assert "there are more" not in browser.get("/records").text


def test_a_large_table_is_not_read_before_somebody_asks(browser, world, monkeypatch):
    pay(world)
    monkeypatch.setattr("flask_idempotency.console.pages.SMALL", 0)
    text = browser.get("/records").text
    assert digits_in(text) == []
    assert "The table is large" in text
    assert len(digits_in(browser.get("/records?operation=&state=").text)) == 1


def test_a_record_is_found_by_its_digits(browser, interrupted):
    digits = interrupted()
    browser.get()
    for typed in digits, digits[:8], f" {digits[:8].upper()} ":
        response = browser.post("/records", digits=typed)
        assert (response.status_code, response.location) == (303, f"/operations/records/{digits}")


def test_a_record_is_found_by_scope_and_key(browser, world):
    pay(world, "key-7")
    browser.get()
    response = browser.post("/records", key="key-7", operation="pay", scope="alice")
    assert response.status_code == 303
    for wrong in (
        {"key": "key-7", "operation": "pay", "scope": "bob"},
        {"key": "key-7", "operation": "pay"},
        {"key": "key-8", "operation": "pay", "scope": "alice"},
        {"key": "key-7", "operation": "refund", "scope": "alice"},
        {"key": "key-7", "operation": "pay", "scope": "alice", "namespace": "v2"},
        {"key": "key-7"},
    ):
        response = browser.post("/records", **wrong)
        assert response.status_code == 404
        assert "key-7" not in response.text


def test_the_records_of_a_scope_are_found_without_a_key(browser, world):
    for key in "one", "two":
        pay(world, key)
    world.post("/payments", "one", user="bob")
    browser.get()
    response = browser.post("/records", scope="alice")
    assert (response.status_code, len(digits_in(response.text))) == (200, 2)
    assert browser.post("/records", scope="bob").status_code == 303
    assert browser.post("/records", scope="alice", operation="pay").status_code == 200
    for wrong in {"scope": "alice", "operation": "refund"}, {"scope": "carol"}:
        assert browser.post("/records", **wrong).status_code == 404


def test_there_is_no_page_of_a_record_that_is_not_there(browser):
    for digits in "ffffffffffffffff", "ffffffff", "zzzzzzzz", "f", "ff" * 20, "é" * 8:
        assert browser.get(f"/records/{digits}").status_code == 404
        browser.get()
        assert browser.post("/records", digits=digits).status_code == 404


def test_names_are_shown_as_text_wherever_they_are_shown(browser, world, interrupted):
    run(world, HTML)
    digits = interrupted(name=f"x{HTML}")
    for path in "/", "/records", f"/records?operation={quote(HTML)}", f"/records/{digits}":
        text = browser.get(path).text
        assert "<b>pay" not in text
        assert "&lt;b&gt;pay&lt;/b&gt;&amp;amp;" in text


def test_a_database_that_is_away_is_a_page_that_says_so():
    app, db, idempotency = Flask("shop"), SQLAlchemy(), Idempotency()
    url = f"postgresql+psycopg2://127.0.0.1:{servers.free_port()}/none"
    app.config.update(SQLALCHEMY_DATABASE_URI=url)
    db.init_app(app)
    idempotency.init_app(app, db, scope=None)
    app.register_blueprint(idempotency.console_blueprint(authorize=lambda: True))
    for path in "/", "/records", "/records/0123456789abcdef":
        response = app.test_client().get(f"/operations{path}")
        assert response.status_code == 503
        assert "<h1>The records cannot be reached</h1>" in response.text
        assert "Connection refused" in response.text
        assert "no-store" in response.headers["Cache-Control"]


def test_a_missing_table_is_a_page_that_says_what_to_run(browser, world):
    world.sql("drop table idempotency_record")
    for path in "/records", "/":
        response = browser.get(path)
        assert response.status_code == 500
        assert "flask idempotency create-table" in response.text


def test_the_page_needs_no_table_of_its_own(world):
    tables = set(world.db.metadata.tables)
    assert tables == {"idempotency_record", "payment"}


class TestOtherStores:
    @pytest.fixture
    def store(self):
        return "redis"

    @pytest.fixture
    def config(self, redis_server):
        return {"IDEMPOTENCY_REDIS_URL": redis_server.url}

    def test_the_pages_of_the_store_redis_show_its_records(self, browser, world):
        pay(world)
        assert "1 completed of pay" in text_of(browser.get())
        [digits] = digits_in(browser.get("/records").text)
        assert browser.get(f"/records/{digits}").status_code == 200


class TestHybrid:
    @pytest.fixture
    def store(self):
        return "hybrid"

    def test_the_overview_says_that_redis_works(self, browser):
        assert "Redis works the lock was taken and released" in text_of(browser.get())

    class TestDead:
        @pytest.fixture
        def config(self):
            return {"IDEMPOTENCY_REDIS_URL": f"redis://127.0.0.1:{servers.free_port()}"}

        def test_the_overview_says_that_redis_has_failed_and_the_rest_works(self, browser, world):
            pay(world)
            text = text_of(browser.get())
            assert "Redis failed" in text
            assert "Requests go on without it" in text
            assert "1 completed of pay" in text


class TestSqlite:
    @pytest.fixture
    def store(self):
        return "sql"

    @pytest.fixture
    def config(self, tmp_path):
        return {"SQLALCHEMY_DATABASE_URI": f"sqlite:///{tmp_path}/shop.db"}

    def test_the_pages_work_on_sqlite(self, browser, world):
        pay(world)
        pay(world)
        assert "1 completed of pay" in text_of(browser.get())
        assert len(digits_in(browser.get("/records").text)) == 1
