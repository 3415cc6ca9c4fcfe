"""A record's page, and what an operator does there."""

import logging
import re

import pytest

from flask_idempotency.core.keys import derive_key

from .conftest import Browser, text_of

ACTIONS = ["release", "resolve", "fail"]


def test_the_page_of_an_interrupted_record(browser, interrupted, world):
    [(key, owner)] = world.sql("select key, owner from idempotency_record")
    page = browser.get(f"/records/{interrupted}")
    text = text_of(page)
    for part in (
        "Interrupted attempt 1 had not ended with its lease",
        "First find out",
        *("Finished: reserve.", "Release it if", "it will not do what comes after reserve"),
        *("Release…", "Resolve…", "Fail…"),
        derive_key(bytes(key), "reserve"),
    ):
        assert part in text
    assert "Completed" not in text
    assert re.search(r"\d\d:\d\d:\d\d\.\d{3}Z", text)
    derived = derive_key(bytes(key), "<charge>")
    assert derived not in text
    assert derived in browser.get(f"/records/{interrupted}?derive=<charge>").text
    assert owner not in page.text + browser.get(f"/records/{interrupted}/release").text
    browser.act(interrupted, "release")
    text = browser.text(f"/records/{interrupted}")
    parts = "Created", "Step reserve finished", "Released by ada: looked it up"
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)


def test_a_body_is_shown_when_asked_for_and_record_and_log_say_to_whom(
    world, browser, completed, audit, caplog
):
    caplog.set_level(logging.INFO, "flask_idempotency")
    path = f"/records/{completed}"
    text = browser.text(path)
    assert re.search(r"Response +201, 2\d B", text)
    assert "Completed in attempt 1, with 201" in text
    assert ("Content-Type application/json" in text, "Release…" in text) == (True, False)
    assert browser.post(f"{path}/body", site="cross-site").status_code == 403
    assert ("canary" in text, "operator shown" in caplog.text, audit()) == (False, False, [])
    browser.get(path)
    assert "&#34;secret&#34;:&#34;canary&#34;" in browser.post(f"{path}/body").text
    [line] = [each for each in caplog.records if hasattr(each, "did")]
    told = f"operator shown: operation pay, id {completed[:8]}, origin console, by ada"
    assert (line.levelname, line.operation, line.getMessage()) == ("INFO", "pay", told)
    assert "canary" not in caplog.text
    assert [entry[:2] for entry in audit()] == [("ada", "shown")]
    assert "Shown by ada" in browser.text(path)


def test_results_of_steps_are_shown_like_bodies_and_that_hides_no_decision(browser, interrupted, audit):
    path = f"/records/{interrupted}"
    assert "&#34;ok&#34;" not in browser.get(path).text
    assert "{&#34;ok&#34;: true}" in browser.post(f"{path}/body").text
    browser.act(interrupted, "resolve", status="201", body="{}")
    browser.post(f"{path}/body")
    assert [did for _, did, _ in audit()] == ["shown", "resolved", "shown"]
    assert "Resolved by ada" in browser.text(path)


@pytest.mark.parametrize("what", ["body", "forget"])
def test_in_a_record_that_is_in_use_nothing_is_shown_or_erased(world, browser, completed, what):
    browser.get(f"/records/{completed}/forget")
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.exec_driver_sql("select * from idempotency_record for update")
        response = browser.post(f"/records/{completed}/{what}")
    assert (response.status_code, "canary" in response.text, len(world.records())) == (409, False, 1)


def test_bodies_and_headers_are_text_whatever_they_are_and_a_long_body_is_cut(
    world, browser, completed
):
    headers = '[["X-Note", "<b>x</b>"], ["Set-Cookie", "never sent"]]'
    world.sql("update idempotency_record set headers = :headers", headers=headers)
    for body, shown in {
        b"</pre><script>alert(1)</script>": "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;",
        b"\xff\xfe\x00 text": "\\xff\\xfe",
        "é\n  two".encode(): "é\n  two",
        b"a" * 100_001: "The first 100,000 bytes",
    }.items():
        world.sql("update idempotency_record set body = :body", body=body)
        browser.get(f"/records/{completed}")
        text = browser.post(f"/records/{completed}/body").text
        assert shown in text
        assert "&lt;b&gt;x&lt;/b&gt;" in text
        for never in "<script>", "<b>x", "never sent", "a" * 100_001:
            assert never not in text
    assert "a" * 100_000 in text


@pytest.mark.parametrize("config", [{"IDEMPOTENCY_ENCRYPTION_KEYS": [bytes(32)]}])
def test_a_sealed_response_is_opened_by_the_applications_keys(world, browser, completed):
    path = f"/records/{completed}"
    assert "Content-Type application/json" in browser.text(path)
    assert "canary" in browser.post(f"{path}/body").text
    world.sql("update idempotency_record set headers = '[]', body = 'canary'")
    browser.get(path)
    text = browser.post(f"{path}/body").text
    assert ("is not encrypted" in text, "canary" in text) == (True, False)


@pytest.mark.parametrize(
    ("action", "did", "status", "shown"),
    [
        ("release", "released", "", "Released: its next retry runs the view again."),
        ("resolve", "resolved", ", status 201", "completed"),
        ("fail", "failed", ", status 500", "Release…"),
    ],
)
def test_a_decision_is_noted_shown_and_logged(
    browser, interrupted, audit, caplog, action, did, status, shown
):
    why = "seen at\r\nthe bank"
    response = browser.act(interrupted, action, why=why, status="201", body='{"id": 7}')
    assert (response.status_code, response.location) == (303, f"/operations/records/{interrupted}")
    assert [entry[:2] for entry in audit()] == [("ada", did)]
    assert shown in browser.text(f"/records/{interrupted}")
    told = f"operator {did}: operation charge, id {interrupted[:8]}{status}, origin console, by ada,"
    assert rf"{told} why seen at\r\nthe bank" in caplog.messages


def test_a_record_is_erased_and_the_log_says_by_whom_in_one_line(world, browser, completed, caplog):
    """Whatever the name is that is stored."""
    caplog.set_level(logging.INFO, "flask_idempotency")
    world.sql("update idempotency_record set name = :odd", odd="pay\nERROR forged\u2028\x1b[2J")
    assert "A retry runs the view again" in browser.text(f"/records/{completed}/forget")
    response = browser.act(completed, "forget", why=None)
    assert (response.status_code, "A retry runs the view again" in response.text) == (200, True)
    assert world.records() == []
    [line] = [each for each in caplog.records if hasattr(each, "did")]
    odd = r"pay\nERROR forged\u2028\x1b[2J"
    told = f"operator erased: operation {odd}, id {completed[:8]}, records 1, origin console, by ada"
    assert (line.levelname, line.operation, line.getMessage()) == ("WARNING", odd, told)


REFUSED = [
    *((action, {"why": "\u200b"}, "Say why") for action in ACTIONS),
    *(("resolve", {"status": each}, "from 200 to 599") for each in ("99", "600", "²", "2" * 5000)),
    ("resolve", {"body": "{", "why": "so \u200d so"}, "not JSON"),
    ("resolve", {"status": "204"}, "has no body"),
    ("resolve", {"content_type": "text/plain\r\nSet-Cookie: a=b"}, "malformed"),
    ("resolve", {"body": ""}, "empty 200"),
]


def test_a_form_that_cannot_be_comes_again_with_what_was_filled_in(browser, interrupted, audit):
    for action, fields, said in REFUSED:
        given = {"body": "{}", "why": "looked it up", **fields}
        response = browser.act(interrupted, action, **given)
        assert (response.status_code, said in text_of(response)) == (400, True)
        assert 'aria-invalid="true"' in response.text or 'name="empty"' in response.text
        assert f'value="{given["why"]}"' in response.text
        assert action != "resolve" or f"{given['body']}</textarea>" in response.text
    assert audit() == []
    assert browser.act(interrupted, "resolve", body="", empty="yes").status_code == 303


def test_asking_changes_nothing_and_nothing_is_done_for_another_site(world, browser, interrupted):
    before = world.records()
    for action in ACTIONS:
        assert "Finished: reserve." in browser.text(f"/records/{interrupted}/{action}")
        assert browser.act(interrupted, action, site="same-site").status_code == 403
        assert browser.act(interrupted, action, seen=None).status_code == 409, "of no page at all"
    for action in "delete", "nonsense":
        assert browser.get(f"/records/{interrupted}/{action}").status_code == 404
        assert browser.post(f"/records/{interrupted}/{action}").status_code == 404
    assert world.records() == before


@pytest.mark.parametrize(
    ("lease", "actions", "said"),
    [
        ("now() + interval '1 h'", ACTIONS, "A worker holds its lease"),
        ("null", ACTIONS, "it needs nothing: its next retry takes over"),
        ("now()", ["forget"], "can be erased"),
    ],
)
def test_what_there_is_nothing_to_decide_about_is_left_alone(
    world, browser, interrupted, audit, lease, actions, said
):
    world.sql(f"update idempotency_record set lease_expires_at = {lease}")
    text = browser.text(f"/records/{interrupted}")
    assert ("Release…" in text) == (actions != ACTIONS)
    browser.get(f"/records/{interrupted}/release")
    for action in actions:
        response = browser.post(f"/records/{interrupted}/{action}", why="because")
        assert response.status_code == 409
        text += text_of(response)
    assert said in text
    assert (audit(), len(world.records())) == ([], 1)


@pytest.mark.parametrize(
    ("action", "said"),
    [("release", "is interrupted now, in attempt 2"), ("forget", "is completed now")],
)
def test_a_page_about_what_was_decides_nothing(world, browser, interrupt, audit, action, said):
    digits, bob = interrupt(), Browser(world.app, "bob")
    if action == "forget":
        browser.act(digits, "fail")
    bob.get(f"/records/{digits}/{action}")
    browser.act(digits, "resolve" if action == "forget" else "release", body="{}")
    if action == "release":
        interrupt()
    response = bob.post(f"/records/{digits}/{action}", why="nothing there")
    assert (response.status_code, said in response.text) == (409, True)
    assert ({by for by, _, _ in audit()}, len(world.records())) == ({"ada"}, 1)


def test_names_and_reasons_are_text_and_what_turns_it_around_is_escaped(world, interrupted):
    mallory = Browser(world.app, "<b>m</b>")
    mallory.act(interrupted, "release", why="<script>1</script>\0 \u202etnes")
    world.sql("update idempotency_record set name = 'char\u202eeg'")
    for page in f"/records/{interrupted}", "/records", "/", f"/records/{interrupted}/resolve":
        text = mallory.get(page).text
        assert r"char\u202eeg" in text
        for never in "\u202e", "<script>", "<b>m":
            assert never not in text
    assert r"&lt;script&gt;1&lt;/script&gt;" in mallory.get(f"/records/{interrupted}").text
