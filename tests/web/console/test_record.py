"""A record's page, and what an operator does there."""

import itertools
import logging
import re

import pytest

from flask_idempotency import current_operation
from flask_idempotency.core.keys import derive_key

from .conftest import INVISIBLE, Browser

ACTIONS = ["release", "resolve", "fail"]


def text_of(response):
    return " ".join(re.sub(r"<[^>]+>", " ", response.text).split())


def digits_of_newest(world):
    found = world.sql("select encode(key, 'hex') from idempotency_record order by created_at desc")
    return found[0][0][:16]


@pytest.fixture
def act(browser):
    """Fills in and sends the form of an action."""

    def act(digits, action, **fields):
        browser.get(f"/records/{digits}/{action}")
        return browser.post(
            f"/records/{digits}/{action}", **{"why": "looked it up", "status": "200", **fields}
        )

    return act


@pytest.fixture
def audit(world):
    return lambda: world.sql("select audit from idempotency_record where audit is not null")


def test_a_record_tells_what_happened_in_order(browser, act, interrupted):
    digits = interrupted()
    act(digits, "release")
    text = text_of(browser.get(f"/records/{digits}"))
    places = [
        text.index(part)
        for part in ("Created", "Step reserve finished", "Released by ada: looked it up")
    ]
    assert places == sorted(places)


def test_an_interrupted_record_says_when_and_what_to_do(browser, interrupted):
    text = text_of(browser.get(f"/records/{interrupted()}"))
    assert "Interrupted attempt 1 had not ended with its lease" in text
    assert "First find out" in text
    for button in "Release…", "Resolve…", "Fail…":
        assert button in text


def test_a_completed_record_shows_its_response_but_not_the_body(browser, world):
    world.post()
    digits = digits_of_newest(world)
    text = text_of(browser.get(f"/records/{digits}"))
    assert re.search(r"Response +201, 2\d B", text)
    assert "Content-Type application/json" in text
    assert "canary" not in text
    assert "Release…" not in text


def test_the_body_is_shown_when_asked_for_and_the_log_says_to_whom(browser, world, caplog):
    caplog.set_level(logging.INFO, "flask_idempotency")
    world.post()
    digits = digits_of_newest(world)
    assert browser._client.get(f"/operations/records/{digits}/body").status_code in (403, 405)
    assert browser.post(f"/records/{digits}/body", site="cross-site").status_code == 403
    assert "operator shown" not in caplog.text
    browser.get(f"/records/{digits}")
    response = browser.post(f"/records/{digits}/body")
    assert "&#34;secret&#34;:&#34;canary&#34;" in response.text
    [line] = [each for each in caplog.records if hasattr(each, "did")]
    told = f"operator shown: operation pay, id {digits[:8]}, origin console, by ada"
    assert (line.levelname, line.getMessage()) == ("INFO", told)
    assert (line.operation, line.by, line.id) == ("pay", "ada", digits[:8])
    assert "canary" not in caplog.text


def test_a_stored_name_begins_no_line_of_the_log(browser, world, caplog):
    caplog.set_level(logging.INFO, "flask_idempotency")
    world.post()
    world.sql("update idempotency_record set name = :odd", odd="pay\nERROR forged\u2028\x1b[2J")
    digits = digits_of_newest(world)
    browser.get(f"/records/{digits}")
    browser.post(f"/records/{digits}/body")
    browser.get(f"/records/{digits}/forget")
    assert browser.post(f"/records/{digits}/forget").status_code == 200
    lines = [each for each in caplog.records if "by ada" in each.getMessage() or hasattr(each, "by")]
    assert len(lines) == 2
    for line in lines:
        assert line.getMessage().isprintable()
        assert line.operation == r"pay\nERROR forged\u2028\x1b[2J"


def test_the_record_notes_to_whom_its_body_was_shown(browser, world, audit, caplog):
    """Whatever the loggers' levels: in production nobody may have set any."""
    caplog.set_level(logging.CRITICAL, "flask_idempotency")
    world.post()
    digits = digits_of_newest(world)
    browser.get(f"/records/{digits}")
    assert audit() == []
    assert "canary" in browser.post(f"/records/{digits}/body").text
    [(entries,)] = audit()
    assert [(each["by"], each["did"]) for each in entries] == [("ada", "shown")]
    assert "Shown by ada" in text_of(browser.get(f"/records/{digits}"))


def test_a_body_that_cannot_be_noted_is_not_shown(browser, world):
    world.post()
    digits = digits_of_newest(world)
    browser.get(f"/records/{digits}")
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.exec_driver_sql("select * from idempotency_record for update")
        response = browser.post(f"/records/{digits}/body")
    assert (response.status_code, "canary" in response.text) == (409, False)


def test_what_was_shown_hides_no_decision(browser, act, interrupted):
    digits = interrupted()
    act(digits, "resolve", status="201", body="{}")
    browser.get(f"/records/{digits}")
    browser.post(f"/records/{digits}/body")
    assert "Resolved by ada" in text_of(browser.get(f"/records/{digits}"))


def test_a_body_is_text_whatever_it_is_and_a_long_one_is_cut(browser, world):
    world.post()
    digits = digits_of_newest(world)
    browser.get(f"/records/{digits}")

    def text_of_body(body):
        world.sql("update idempotency_record set body = :body", body=body)
        return browser.post(f"/records/{digits}/body").text

    for body, shown in {
        b"<script>alert(1)</script>": "&lt;script&gt;alert(1)&lt;/script&gt;",
        b"</pre><img src=x onerror=y>": "&lt;/pre&gt;&lt;img",
        b"\xff\xfe\x00 text": "\\xff\\xfe",
        "é\n  two".encode(): "é\n  two",
    }.items():
        text = text_of_body(body)
        assert shown in text
        assert "<script>" not in text
        assert "<img" not in text
    text = text_of_body(b"a" * 100_001)
    assert "The first 100,000 bytes" in text
    assert "a" * 100_000 in text
    assert "a" * 100_001 not in text


def test_headers_are_text_and_those_that_are_never_sent_are_not_shown(browser, world):
    world.post()
    world.sql(
        """update idempotency_record set headers =
        '[["X-Note", "<b>x</b>"], ["Set-Cookie", "canary"]]'"""
    )
    text = browser.get(f"/records/{digits_of_newest(world)}").text
    assert "&lt;b&gt;x&lt;/b&gt;" in text
    assert "canary" not in text


class TestSealed:
    @pytest.fixture
    def config(self):
        return {"IDEMPOTENCY_ENCRYPTION_KEYS": [bytes(32)]}

    def test_a_sealed_response_is_opened_by_the_applications_keys(self, browser, world):
        world.post()
        digits = digits_of_newest(world)
        assert "Content-Type application/json" in text_of(browser.get(f"/records/{digits}"))
        assert "canary" in browser.post(f"/records/{digits}/body").text

    def test_one_that_was_changed_is_told_and_not_shown(self, browser, world):
        world.post()
        world.sql("update idempotency_record set status = 200")
        digits = digits_of_newest(world)
        browser.get()
        for response in browser.get(f"/records/{digits}"), browser.post(f"/records/{digits}/body"):
            assert response.status_code == 200
            assert "record cannot be read" in response.text
            assert "canary" not in response.text

    def test_one_that_no_retry_gets_is_not_shown(self, browser, world, make_world):
        world.post()
        world.sql("update idempotency_record set headers = '[]', body = 'canary'")
        same = {"SQLALCHEMY_DATABASE_URI": world.app.config["SQLALCHEMY_DATABASE_URI"]}
        keyless = make_world(**same)
        blueprint = keyless.idempotency.console_blueprint(authorize=lambda: True)
        keyless.app.register_blueprint(blueprint)
        path = f"/records/{digits_of_newest(world)}"
        for each, said in (
            (browser, "is not encrypted"),
            (Browser(keyless.app, "bob"), "IDEMPOTENCY_ENCRYPTION_KEYS is empty here"),
        ):
            each.get()
            for response in each.get(path), each.post(f"{path}/body"):
                assert response.status_code == 200
                assert said in response.text
                assert "canary" not in response.text

    def test_a_resolved_response_is_sealed(self, browser, world, act, interrupted):
        digits = interrupted()
        act(digits, "resolve", status="200", body='{"canary": 1}')
        [(body,)] = world.sql("select body from idempotency_record")
        assert b"canary" not in bytes(body)
        browser.get(f"/records/{digits}")
        assert "canary" in browser.post(f"/records/{digits}/body").text


def test_a_broken_record_has_a_page_too(browser, world):
    world.post()
    world.sql("update idempotency_record set headers = '[1]'")
    response = browser.get(f"/records/{digits_of_newest(world)}")
    assert response.status_code == 200
    assert "record cannot be read" in response.text


def test_a_released_operation_runs_again(browser, world, act, interrupted, audit):
    digits = interrupted()
    response = act(digits, "release")
    assert (response.status_code, response.location) == (
        303,
        f"/operations/records/{digits}",
    )
    released = "Released: its next retry runs the view again."
    assert released in browser.get(f"/records/{digits}").text
    [(entries,)] = audit()
    assert [(each["by"], each["did"], each["why"]) for each in entries] == [
        ("ada", "released", "looked it up")
    ]
    with world.app.app_context():
        done = world.idempotency.run(
            "key-1", lambda: current_operation.attempt, scope="alice", name="charge", atomic=False
        )
    assert done == 2
    assert released not in browser.get(f"/records/{digits}").text


def test_a_resolved_operation_has_the_response_given(browser, world, interrupted, act, audit):
    digits = interrupted()
    response = act(digits, "resolve", status="201", body='{"id": 7}', content_type="application/json")
    assert response.status_code == 303
    [(entries,)] = audit()
    assert entries[0]["did"] == "resolved"
    [(status, body)] = world.sql("select status, body from idempotency_record")
    assert (status, bytes(body)) == (201, b'{"id": 7}')
    assert "completed" in text_of(browser.get(f"/records/{digits}"))


def test_a_failed_operation_can_be_released(browser, world, interrupted, act, audit):
    digits = interrupted()
    assert act(digits, "fail").status_code == 303
    page = text_of(browser.get(f"/records/{digits}"))
    assert "500" in page
    assert "Release…" in page
    assert act(digits, "release", why="it may").status_code == 303
    assert [each["did"] for each in audit()[0][0]] == ["failed", "released"]


def test_a_record_is_erased_and_the_log_says_by_whom(browser, world, act, caplog):
    caplog.set_level(logging.INFO, "flask_idempotency")
    world.post()
    digits = digits_of_newest(world)
    assert "A retry runs the view again" in text_of(browser.get(f"/records/{digits}/forget"))
    response = act(digits, "forget", why=None)
    assert (response.status_code, "A retry runs the view again" in response.text) == (200, True)
    assert world.records() == []
    [line] = [each for each in caplog.records if hasattr(each, "did")]
    told = f"operator erased: operation pay, id {digits[:8]}, records 1, origin console, by ada"
    assert (line.levelname, line.getMessage()) == ("WARNING", told)


@pytest.mark.parametrize(
    ("action", "did", "status"),
    [
        ("release", "released", ""),
        ("resolve", "resolved", ", status 200"),
        ("fail", "failed", ", status 500"),
    ],
)
def test_a_decision_is_a_line_of_the_log(browser, interrupted, act, caplog, action, did, status):
    caplog.set_level(logging.WARNING, "flask_idempotency")
    digits = interrupted()
    act(digits, action, why="")
    assert act(digits, action, why="seen at\r\nthe bank", body="{}").status_code == 303
    [line] = [each for each in caplog.records if hasattr(each, "did")]
    assert (line.did, line.operation, line.id) == (did, "charge", digits[:8])
    assert line.getMessage() == (
        f"operator {did}: operation charge, id {digits[:8]}{status}, origin console, by ada,"
        r" why seen at\r\nthe bank"
    )


@pytest.mark.usefixtures("failing_log")
def test_logging_that_fails_changes_nothing_that_an_operator_does(browser, world, act):
    world.post()
    digits = digits_of_newest(world)
    browser.get(f"/records/{digits}")
    assert "canary" in browser.post(f"/records/{digits}/body").text
    assert act(digits, "forget", why=None).status_code == 200
    assert world.records() == []


def test_what_is_interrupted_is_not_erased_before_it_is_decided(browser, world, interrupted, act):
    digits = interrupted()
    assert browser.get(f"/records/{digits}/forget").status_code == 409
    browser.get(f"/records/{digits}/release")
    assert "can be erased" in browser.post(f"/records/{digits}/forget").text
    assert len(world.records()) == 1
    act(digits, "fail")
    assert act(digits, "forget").status_code == 200
    assert world.records() == []


def test_what_is_in_use_is_not_erased(browser, world, act):
    world.post()
    digits = digits_of_newest(world)
    browser.get(f"/records/{digits}/forget")
    with world.app.app_context(), world.db.engine.begin() as connection:
        connection.exec_driver_sql("select * from idempotency_record for update")
        response = browser.post(f"/records/{digits}/forget")
    assert response.status_code == 409
    assert "nothing was erased" in response.text
    assert len(world.records()) == 1


def test_nothing_is_done_without_a_reason(browser, interrupted, act, audit):
    digits = interrupted()
    reasons = ["", "  ", "x" * 501, "\u200b", *INVISIBLE]
    for action, why in [*itertools.product(ACTIONS, reasons[:1]), *(("fail", why) for why in reasons)]:
        response = act(digits, action, why=why, body="{}")
        assert response.status_code == 400
        assert 'aria-invalid="true"' in response.text
        assert "Say why" in response.text
    assert audit() == []


IMPOSSIBLE = [
    ({"status": "99"}, "from 200 to 599"),
    ({"status": "600"}, "from 200 to 599"),
    ({"status": "²"}, "from 200 to 599"),
    ({"status": "2" * 5000}, "from 200 to 599"),
    ({"status": "200", "body": "[" * 1200 + "]" * 1200}, "not JSON"),
    ({"status": "200", "body": "{"}, "not JSON"),
    ({"status": "204", "body": "{}"}, "has no body"),
]


def test_a_response_that_cannot_be_is_not_stored(browser, interrupted, act, audit):
    digits = interrupted()
    for fields, said in IMPOSSIBLE:
        response = act(digits, "resolve", **fields)
        assert response.status_code == 400
        assert said in response.text
        assert 'value="looked it up"' in response.text, "what was filled in stays"
    assert audit() == []


def test_an_empty_response_is_stored_only_when_it_is_meant(browser, interrupted, act, audit):
    digits = interrupted()
    response = act(digits, "resolve", status="200", body="")
    assert response.status_code == 400
    assert "empty 200" in text_of(response)
    assert 'name="empty"' in response.text
    assert audit() == []
    assert 'value="looked it up"' in response.text
    assert act(digits, "resolve", status="200", body="", empty="yes").status_code == 303


def test_a_response_without_content_is_no_empty_one(interrupted, act):
    assert act(interrupted(), "resolve", status="204", body="").status_code == 303


def test_the_pages_say_which_of_the_two(browser, interrupted):
    digits = interrupted()
    for path, parts in {
        "": ("Finished: reserve.", "Release it if", "it will not do what comes after reserve"),
        "/release": ("Finished: reserve.", "Release it if"),
        "/resolve": ("Finished: reserve.", "it will not do what comes after reserve", "Release it if"),
        "/fail": ("Finished: reserve.",),
    }.items():
        text = text_of(browser.get(f"/records/{digits}{path}"))
        assert [part for part in parts if part not in text] == [], path


def test_a_step_has_its_key_for_the_other_service(browser, world, interrupted):
    digits = interrupted()
    [(key,)] = world.sql("select key from idempotency_record")
    page = browser.get(f"/records/{digits}")
    assert derive_key(bytes(key), "reserve") in page.text
    assert derive_key(bytes(key), "charge") not in page.text
    assert derive_key(bytes(key), "<charge>") in browser.get(f"/records/{digits}?derive=<charge>").text


def test_results_of_steps_are_shown_like_bodies(browser, interrupted, audit):
    digits = interrupted()
    assert "&#34;ok&#34;" not in browser.get(f"/records/{digits}").text
    response = browser.post(f"/records/{digits}/body")
    assert "{&#34;ok&#34;: true}" in response.text
    assert [each["did"] for each in audit()[0][0]] == ["shown"]


def test_times_have_milliseconds_and_their_zone(browser, interrupted):
    text = text_of(browser.get(f"/records/{interrupted()}"))
    assert re.search(r"\d\d:\d\d:\d\d\.\d{3}Z", text)


def test_a_content_type_brings_no_other_header(browser, world, interrupted, act):
    kind = "text/plain\r\nSet-Cookie: a=b"
    act(interrupted(), "resolve", status="200", body="x", content_type=kind)
    [(headers,)] = world.sql("select headers::text from idempotency_record")
    assert "\\n" not in (headers or "")
    assert "Set-Cookie" not in (headers or "")


def test_asking_changes_nothing_and_nothing_is_done_for_another_site(browser, world, interrupted, act):
    digits = interrupted()
    before = world.records()
    for action in ACTIONS:
        response = browser.get(f"/records/{digits}/{action}")
        assert response.status_code == 200
        assert "Finished: reserve." in text_of(response)
        assert act(digits, action, site="same-site").status_code == 403
    assert world.records() == before


def test_what_has_completed_cannot_be_decided(browser, world, act, audit):
    world.post()
    digits = digits_of_newest(world)
    for action in ACTIONS:
        assert browser.get(f"/records/{digits}/{action}").status_code == 409
        assert act(digits, action).status_code in (403, 409)
        browser.get(f"/records/{digits}/forget")
        response = browser.post(f"/records/{digits}/{action}", why="because")
        assert response.status_code == 409
        assert "is completed: only what is interrupted or failed can be" in response.text
    assert audit() == []


def test_a_page_about_an_earlier_attempt_decides_nothing(
    world, browser, another, interrupted, act, audit
):
    digits = interrupted()
    bob = another("bob")
    bob.get(f"/records/{digits}/release")
    act(digits, "release")
    interrupted()
    response = bob.post(f"/records/{digits}/release", why="nothing there")
    assert response.status_code == 409
    assert "is interrupted now, in attempt 2" in response.text
    assert len(audit()[0][0]) == 1


def test_nobody_undoes_a_decision_without_having_seen_it(browser, another, interrupted, act, audit):
    digits = interrupted()
    bob = another("bob")
    bob.get(f"/records/{digits}/release")
    act(digits, "fail")
    response = bob.post(f"/records/{digits}/release", why="nothing there")
    assert response.status_code == 409
    assert "is failed now" in response.text
    assert [each["did"] for each in audit()[0][0]] == ["failed"]
    bob.get(f"/records/{digits}/release")
    assert bob.post(f"/records/{digits}/release", why="I have seen it").status_code == 303


def test_what_was_resolved_meanwhile_is_not_erased(world, browser, another, interrupted, act):
    digits = interrupted()
    act(digits, "fail")
    bob = another("bob")
    bob.get(f"/records/{digits}/forget")
    act(digits, "resolve", status="201", body="{}")
    response = bob.post(f"/records/{digits}/forget")
    assert response.status_code == 409
    assert "is completed now" in response.text
    assert len(world.records()) == 1


def test_a_form_tells_nothing_of_the_owner(world, browser, interrupted):
    page = browser.get(f"/records/{interrupted()}/release").text
    [(owner,)] = world.sql("select owner from idempotency_record")
    assert owner not in page


def test_an_operation_that_runs_is_left_alone(world, browser, interrupted):
    digits = interrupted()
    world.sql("update idempotency_record set lease_expires_at = now() + interval '1 h'")
    text = text_of(browser.get(f"/records/{digits}"))
    assert "A worker holds its lease" in text
    assert "Its lease ends" in text
    assert "Release…" not in text
    browser.get()
    assert browser.post(f"/records/{digits}/release", why="x").status_code == 409


def test_an_atomic_operation_in_progress_needs_nothing(world, browser):
    with world.app.app_context(), pytest.raises(SystemExit):
        world.idempotency.run("key-1", exit_worker, scope="alice", name="charge")
    text = text_of(browser.get(f"/records/{digits_of_newest(world)}"))
    assert "it needs nothing: its next retry takes over" in text


def exit_worker():
    raise SystemExit(1)


def test_there_are_no_other_actions(browser, interrupted):
    digits = interrupted()
    for action in "delete", "nonsense":
        assert browser.get(f"/records/{digits}/{action}").status_code == 404
        assert browser.post(f"/records/{digits}/{action}").status_code == 404


def test_reasons_and_names_are_text(browser, another, interrupted, act):
    digits = interrupted()
    mallory = another("<b>m</b>")
    mallory.get(f"/records/{digits}/release")
    mallory.post(f"/records/{digits}/release", why="<script>1</script>\0")
    text = browser.get(f"/records/{digits}").text
    assert "&lt;script&gt;1&lt;/script&gt;" in text
    assert "<script>" not in text
    assert "<b>m</b>" not in text


def test_what_turns_text_around_is_shown_escaped(browser, world, interrupted, act):
    """Whoever gives a reason, or writes to the table, lets no other text look like something else."""
    digits = interrupted()
    assert act(digits, "release", why="not \u202etnes").status_code == 303
    world.sql("update idempotency_record set name = 'char\u202eeg'")
    for page in f"/records/{digits}", "/records", "/", f"/records/{digits}/resolve":
        text = browser.get(page).text
        assert "\u202e" not in text
        assert r"char\u202eeg" in text
    assert r"not \u202etnes" in browser.get(f"/records/{digits}").text


def test_what_was_filled_in_stays_as_it_is(browser, interrupted, act):
    """Even where it is not what the commands would print: it may be sent again."""
    response = act(interrupted(), "resolve", status="99", body='{"a":\n "\u200d"}', why="so \u200d so")
    assert response.status_code == 400
    assert "{&#34;a&#34;:\n &#34;\u200d&#34;}</textarea>" in response.text
    assert 'value="so \u200d so"' in response.text


def test_what_is_older_than_its_ttl_is_released_only_by_who_has_seen_the_books(
    browser, world, act, interrupted
):
    digits = interrupted()
    assert 'name="not_done"' not in browser.get(f"/records/{digits}/release").text
    world.sql("update idempotency_record set created_at = now() - interval '25 hours'")
    assert 'name="not_done"' in browser.get(f"/records/{digits}/release").text
    answer = act(digits, "release")
    assert answer.status_code == 400
    assert "began 1 d 1 h ago, and its ttl is 1 d" in text_of(answer)
    assert "books show no more than the finished steps" in text_of(answer)
    assert "Released" not in text_of(browser.get(f"/records/{digits}"))
    assert act(digits, "release", not_done="yes").status_code == 303
    assert "Released by ada: looked it up" in text_of(browser.get(f"/records/{digits}"))
