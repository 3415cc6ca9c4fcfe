"""A record's page, and what an operator does there."""

import logging
import re

import pytest

from flask_idempotency import current_operation
from flask_idempotency.core.keys import derive_key

from .conftest import INVISIBLE, Browser, text_of

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
    assert "Content-Type application/json" in text
    assert "Release…" not in text
    assert browser.post(f"{path}/body", site="cross-site").status_code == 403
    assert ("canary" in text, "operator shown" in caplog.text, audit()) == (False, False, [])
    browser.get(path)
    assert "&#34;secret&#34;:&#34;canary&#34;" in browser.post(f"{path}/body").text
    [line] = [each for each in caplog.records if hasattr(each, "did")]
    told = f"operator shown: operation pay, id {completed[:8]}, origin console, by ada"
    assert (line.levelname, line.getMessage()) == ("INFO", told)
    assert (line.operation, line.by, line.id) == ("pay", "ada", completed[:8])
    assert "canary" not in caplog.text
    assert [entry[:2] for entry in audit()] == [("ada", "shown")]
    assert "Shown by ada" in browser.text(path)


def test_results_of_steps_are_shown_like_bodies_and_that_hides_no_decision(browser, interrupted, audit):
    assert "&#34;ok&#34;" not in browser.get(f"/records/{interrupted}").text
    assert "{&#34;ok&#34;: true}" in browser.post(f"/records/{interrupted}/body").text
    browser.act(interrupted, "resolve", status="201", body="{}")
    browser.post(f"/records/{interrupted}/body")
    assert [did for _, did, _ in audit()] == ["shown", "resolved", "shown"]
    assert "Resolved by ada" in browser.text(f"/records/{interrupted}")


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
    world.sql(
        """update idempotency_record set headers =
        '[["X-Note", "<b>x</b>"], ["Set-Cookie", "never sent"]]'"""
    )
    for body, shown in {
        b"<script>alert(1)</script>": "&lt;script&gt;alert(1)&lt;/script&gt;",
        b"</pre><img src=x onerror=y>": "&lt;/pre&gt;&lt;img",
        b"\xff\xfe\x00 text": "\\xff\\xfe",
        "é\n  two".encode(): "é\n  two",
        b"a" * 100_001: "The first 100,000 bytes",
    }.items():
        world.sql("update idempotency_record set body = :body", body=body)
        browser.get(f"/records/{completed}")
        text = browser.post(f"/records/{completed}/body").text
        assert shown in text
        assert "&lt;b&gt;x&lt;/b&gt;" in text
        for never in "<script>", "<img", "<b>x", "never sent", "a" * 100_001:
            assert never not in text
    assert "a" * 100_000 in text


class TestSealed:
    @pytest.fixture
    def config(self):
        return {"IDEMPOTENCY_ENCRYPTION_KEYS": [bytes(32)]}

    def test_a_sealed_response_is_opened_by_the_applications_keys(self, browser, completed):
        assert "Content-Type application/json" in browser.text(f"/records/{completed}")
        assert "canary" in browser.post(f"/records/{completed}/body").text

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ("status = 200", "record cannot be read"),
            ("headers = '[]', body = 'canary'", "is not encrypted"),
        ],
    )
    def test_one_that_was_changed_is_told_and_not_shown(self, world, browser, completed, change, said):
        world.sql(f"update idempotency_record set {change}")
        browser.get()
        path = f"/records/{completed}"
        for response in browser.get(path), browser.post(f"{path}/body"):
            assert response.status_code == 200
            assert said in response.text
            assert "canary" not in response.text

    def test_without_the_keys_it_stays_shut(self, make_world, world, completed):
        world.sql("update idempotency_record set headers = '[]', body = 'canary'")
        url = world.app.config["SQLALCHEMY_DATABASE_URI"]
        keyless = make_world(SQLALCHEMY_DATABASE_URI=url)
        blueprint = keyless.idempotency.console_blueprint(authorize=lambda: True)
        keyless.app.register_blueprint(blueprint)
        browser = Browser(keyless.app, "bob")
        assert "IDEMPOTENCY_ENCRYPTION_KEYS is empty here" in browser.text(f"/records/{completed}")
        assert "canary" not in browser.post(f"/records/{completed}/body").text

    def test_a_resolved_response_is_sealed(self, world, browser, interrupted):
        browser.act(interrupted, "resolve", body='{"canary": 1}')
        [(body,)] = world.sql("select body from idempotency_record")
        assert b"canary" not in bytes(body)
        browser.get(f"/records/{interrupted}")
        assert "canary" in browser.post(f"/records/{interrupted}/body").text


def test_a_broken_record_has_a_page_too(world, browser, completed):
    world.sql("update idempotency_record set headers = '[1]'")
    response = browser.get(f"/records/{completed}")
    assert (response.status_code, "record cannot be read" in response.text) == (200, True)


DECISIONS = {
    "release": ("released", "", "Released: its next retry runs the view again."),
    "resolve": ("resolved", ", status 201", "completed"),
    "fail": ("failed", ", status 500", "Release…"),
}


@pytest.mark.parametrize("action", DECISIONS)
def test_a_decision_is_noted_shown_and_logged(browser, interrupted, audit, caplog, action):
    caplog.set_level(logging.WARNING, "flask_idempotency")
    did, status, shown = DECISIONS[action]
    why = "seen at\r\nthe bank"
    response = browser.act(interrupted, action, why=why, status="201", body='{"id": 7}')
    assert (response.status_code, response.location) == (303, f"/operations/records/{interrupted}")
    assert [entry[:2] for entry in audit()] == [("ada", did)]
    assert shown in browser.text(f"/records/{interrupted}")
    [line] = [each for each in caplog.records if hasattr(each, "did")]
    assert (line.did, line.operation, line.id) == (did, "charge", interrupted[:8])
    assert line.getMessage() == (
        f"operator {did}: operation charge, id {interrupted[:8]}{status}, origin console, by ada,"
        r" why seen at\r\nthe bank"
    )


def test_what_retries_get_after_a_decision(world, browser, interrupt):
    def run(key):
        with world.app.app_context():
            attempt = lambda: current_operation.attempt  # noqa: E731
            return world.idempotency.run(key, attempt, scope="alice", name="charge", atomic=False)

    digits = interrupt("one")
    browser.act(digits, "fail")
    assert browser.act(digits, "release").status_code == 303
    assert run("one") == 2
    assert DECISIONS["release"][2] not in browser.get(f"/records/{digits}").text
    browser.act(interrupt("two"), "resolve", body="7", content_type="application/json")
    assert run("two") == 7


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


@pytest.mark.usefixtures("failing_log")
def test_logging_that_fails_changes_nothing_that_an_operator_does(world, browser, completed):
    browser.get(f"/records/{completed}")
    assert "canary" in browser.post(f"/records/{completed}/body").text
    assert browser.act(completed, "forget").status_code == 200
    assert world.records() == []


def test_what_is_interrupted_is_not_erased_before_it_is_decided(world, browser, interrupted):
    assert browser.get(f"/records/{interrupted}/forget").status_code == 409
    browser.get(f"/records/{interrupted}/release")
    assert "can be erased" in browser.post(f"/records/{interrupted}/forget").text
    assert len(world.records()) == 1
    browser.act(interrupted, "fail")
    assert browser.act(interrupted, "forget").status_code == 200
    assert world.records() == []


REFUSED = [
    *((action, {"why": ""}, "Say why") for action in ACTIONS),
    *(("fail", {"why": why}, "Say why") for why in ("  ", "x" * 501, "\u200b", *INVISIBLE)),
    *(("resolve", {"status": each}, "from 200 to 599") for each in ("99", "600", "²", "2" * 5000)),
    ("resolve", {"body": "[" * 1200 + "]" * 1200}, "not JSON"),
    ("resolve", {"body": "{", "why": "so \u200d so"}, "not JSON"),
    ("resolve", {"status": "204"}, "has no body"),
    ("resolve", {"body": ""}, "empty 200"),
]


def test_a_form_that_cannot_be_comes_again_with_what_was_filled_in(browser, interrupted, audit):
    for action, fields, said in REFUSED:
        given = {"body": "{}", "why": "looked it up", **fields}
        response = browser.act(interrupted, action, **given)
        assert response.status_code == 400
        assert said in text_of(response)
        assert 'aria-invalid="true"' in response.text or 'name="empty"' in response.text
        assert f'value="{given["why"]}"' in response.text
        if action == "resolve":
            assert f"{given['body']}</textarea>" in response.text
    assert audit() == []


@pytest.mark.parametrize("fields", [{"status": "204"}, {"status": "200", "empty": "yes"}])
def test_an_empty_response_is_stored_only_when_it_is_meant(browser, interrupted, fields):
    assert browser.act(interrupted, "resolve", body="", **fields).status_code == 303


def test_a_content_type_brings_no_other_header(world, browser, interrupted):
    kind = "text/plain\r\nSet-Cookie: a=b"
    browser.act(interrupted, "resolve", body="x", content_type=kind)
    [(headers,)] = world.sql("select headers::text from idempotency_record")
    assert "\\n" not in (headers or "")
    assert "Set-Cookie" not in (headers or "")


def test_asking_changes_nothing_and_nothing_is_done_for_another_site(world, browser, interrupted):
    before = world.records()
    for action in ACTIONS:
        assert "Finished: reserve." in browser.text(f"/records/{interrupted}/{action}")
        assert browser.act(interrupted, action, site="same-site").status_code == 403
    for action in "delete", "nonsense":
        assert browser.get(f"/records/{interrupted}/{action}").status_code == 404
        assert browser.post(f"/records/{interrupted}/{action}").status_code == 404
    assert world.records() == before


def test_what_has_completed_cannot_be_decided(browser, completed, audit):
    for action in ACTIONS:
        assert browser.get(f"/records/{completed}/{action}").status_code == 409
        browser.get(f"/records/{completed}/forget")
        response = browser.post(f"/records/{completed}/{action}", why="because")
        assert response.status_code == 409
        assert "is completed: only what is interrupted or failed can be" in response.text
    assert audit() == []


def test_what_runs_is_left_alone(world, browser, interrupted):
    world.sql("update idempotency_record set lease_expires_at = now() + interval '1 h'")
    text = browser.text(f"/records/{interrupted}")
    assert "A worker holds its lease" in text
    assert "Its lease ends" in text
    assert "Release…" not in text
    browser.get()
    assert browser.post(f"/records/{interrupted}/release", why="x").status_code == 409


def test_an_atomic_operation_in_progress_needs_nothing(world, browser, newest):
    def exit_worker():
        raise SystemExit(1)

    with world.app.app_context(), pytest.raises(SystemExit):
        world.idempotency.run("key-1", exit_worker, scope="alice", name="charge")
    assert "it needs nothing: its next retry takes over" in browser.text(f"/records/{newest()}")


MEANWHILE = {
    "it ran again": ("release", ["release", "interrupt"], "is interrupted now, in attempt 2"),
    "it was decided": ("release", ["fail"], "is failed now"),
    "it was resolved": ("forget", ["resolve"], "is completed now"),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_a_page_about_what_was_decides_nothing(world, browser, bob, interrupt, audit, what):
    action, acts, said = MEANWHILE[what]
    digits = interrupt()
    if action == "forget":
        browser.act(digits, "fail")
    bob.get(f"/records/{digits}/{action}")
    for each in acts:
        interrupt() if each == "interrupt" else browser.act(digits, each, body="{}")
    response = bob.post(f"/records/{digits}/{action}", why="nothing there")
    assert (response.status_code, said in response.text) == (409, True)
    assert {by for by, _, _ in audit()} == {"ada"}
    assert len(world.records()) == 1
    if action == "release":
        assert bob.act(digits, "release").status_code == 303, "bob has seen it"


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


def test_what_is_older_than_its_ttl_is_released_only_by_who_has_seen_the_books(
    world, browser, interrupted, audit
):
    form = f"/records/{interrupted}/release"
    assert 'name="not_done"' not in browser.get(form).text
    world.sql("update idempotency_record set created_at = now() - interval '25 hours'")
    assert 'name="not_done"' in browser.get(form).text
    answer = browser.act(interrupted, "release")
    assert answer.status_code == 400
    assert "began 1 d 1 h ago, and its ttl is 1 d" in text_of(answer)
    assert "books show no more than the finished steps" in text_of(answer)
    assert audit() == []
    assert browser.act(interrupted, "release", not_done="yes").status_code == 303
    assert [entry[:2] for entry in audit()] == [("ada", "released")]
