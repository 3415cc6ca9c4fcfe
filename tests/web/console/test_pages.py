"""What the overview and the list show, and how a record is found."""

import re

import pytest

import servers
from tests.integration.commands.running import build, build_console


def digits_in(response):
    return re.findall(r'class="digits" href="/operations/records/([0-9a-f]{16})"', response.text)


def test_the_overview_counts_records_and_leads_to_what_was_interrupted(browser, world, interrupt):
    assert "nothing stopped midway" in browser.text()
    for key in "one", "one", "two":
        world.post(key=key)
    first, second = interrupt("one"), interrupt("two")
    text = browser.text()
    assert re.search(r"Records +4 +counted", text)
    assert re.search(r"Operation +interrupted +completed", text)
    assert re.search(r"charge +2 +interrupted of charge +·", text)
    assert re.search(r"pay +· +2 +completed of pay", text)
    assert "stopped midway, the oldest" in text
    assert "wait for you" not in text, "a retry may run it again without anybody's doing"
    for page in "/", "/records?state=interrupted":
        assert digits_in(browser.get(page)) == [second, first], "the newest comes first"


def test_the_list_shows_one_operation_or_state(browser, world, interrupted):
    world.post()
    for query, count in (
        ("", 2),
        ("?operation=pay", 1),
        ("?state=completed", 1),
        ("?state=&operation=", 2),
    ):
        assert len(digits_in(browser.get(f"/records{query}"))) == count
    assert "There is no such record" in browser.get("/records?operation=pay&state=failed").text
    for state in "weird", "%00", "Completed":
        response = browser.get(f"/records?state={state}")
        assert response.status_code == 404
        assert "the states are in_progress, completed, failed, interrupted" in response.text


def test_a_long_list_says_that_there_are_more_and_a_large_table_is_not_read_unasked(
    browser, world, monkeypatch
):
    for number in range(3):
        world.post(key=f"key-{number}")
    monkeypatch.setattr("flask_idempotency.console.pages.PAGE", 2)
    for page in browser.get("/records?operation=pay"), browser.post("/records", scope="alice"):
        assert len(digits_in(page)) == 2
        assert "These are 2, and there are more" in page.text
    monkeypatch.setattr("flask_idempotency.console.pages.PAGE", 3)
    assert "there are more" not in browser.get("/records").text
    monkeypatch.setattr("flask_idempotency.console.pages.SMALL", 0)
    page = browser.get("/records")
    assert (digits_in(page), "The table is large" in page.text) == ([], True)
    assert len(digits_in(browser.get("/records?operation=&state="))) == 3


def test_records_are_found_by_digits_by_scope_and_key_or_by_scope(browser, world, completed):
    browser.get()
    key = {"key": "key-1", "operation": "pay", "scope": "alice"}
    digits = completed, completed[:8], f" {completed[:8].upper()} "
    for sought in (*({"digits": each} for each in digits), key, {"scope": "alice"}):
        response = browser.post("/records", **sought)
        assert (response.status_code, response.location) == (303, f"/operations/records/{completed}")
    for wrong in {"key": "key-2"}, {"scope": "carol"}, {"namespace": "v2"}, {"scope": None}:
        response = browser.post("/records", **{**key, **wrong})
        assert (response.status_code, "key-1" in response.text) == (404, False)
    for digits in "ffffffffffffffff", "zzzzzzzz", "f", "ff" * 20, "é" * 8:
        assert browser.get(f"/records/{digits}").status_code == 404
        browser.get()
        assert browser.post("/records", digits=digits).status_code == 404
    world.post(key="two"), world.post(user="bob")
    response = browser.post("/records", scope="alice", operation="pay")
    assert (response.status_code, len(digits_in(response))) == (200, 2)


def test_a_database_that_is_away_is_a_page_that_says_so():
    app = build_console(build(f"postgresql+psycopg2://127.0.0.1:{servers.free_port()}/none"))
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
        assert (response.status_code, "flask idempotency create-table" in response.text) == (500, True)


@pytest.mark.parametrize("store", ["hybrid"], indirect=True)
@pytest.mark.parametrize("config", [{"IDEMPOTENCY_REDIS_URL": "redis://127.0.0.1:1/0"}])
def test_the_pages_work_without_redis(browser, world):
    world.post(), world.post()
    text = browser.text()
    assert ("1 completed of pay" in text, "Requests go on without it" in text) == (True, True)
    [digits] = digits_in(browser.get("/records"))
    assert browser.get(f"/records/{digits}").status_code == 200
