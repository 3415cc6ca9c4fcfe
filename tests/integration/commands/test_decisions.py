"""``flask idempotency release`` and ``resolve``: what an operator decides, and what is noted of it."""

from __future__ import annotations

import getpass
import json
from datetime import datetime, timedelta, timezone
from typing import Any

import click
import pytest
from sqlalchemy import make_url

from bench.network import Network
from flask_idempotency import current_operation, idempotent
from flask_idempotency.cli import cli
from flask_idempotency.stores.admin import AuditEntry
from tests.drivers import EACH
from tests.integration.commands.running import build, once, runner
from tests.killed import Killed

WHY = "the provider has charged it"
PAID = ["--status", "201", "--body", '{"paid": true}', "--why", WHY]
RELEASE = ["release", "--why", WHY]
KEYS = ["Yj1B5nbJVnb2nFHwpIlN8qn-_2XxXh6m0l0ZkJ3W7xE"]


class Orders:
    """Orders that are not atomic; the first attempt at each is killed, and others in ``deadly``."""

    def __init__(self, world: Any) -> None:
        self.world, self.run, self.calls = world, runner(world.app), list[int]()
        self.deadly = {1}
        world.app.post("/orders", endpoint="order")(idempotent(atomic=False)(self.order))

    def order(self) -> Any:
        self.calls.append(current_operation.attempt)
        current_operation.step("charge", lambda: 17)
        if current_operation.attempt in self.deadly:
            raise Killed
        return {"attempt": current_operation.attempt}, 201

    def interrupt(self) -> str:
        """Kill an order; its digits."""
        with pytest.raises(Killed):
            self.send()
        return str(self.lines()[0]["key"])

    def send(self) -> Any:
        return self.world.post("/orders")

    def lines(self) -> Any:
        return json.loads(self.run("list", "--json").output)

    def show(self, digits: str) -> Any:
        return json.loads(self.run("show", digits, "--json").output)[0]


@pytest.fixture
def orders(world: Any) -> Orders:
    return Orders(world)


def refused(result: Any) -> str:
    assert result.exit_code == 1, result.output
    return str(result.output)


def test_every_retry_gets_the_response_that_was_given(orders):
    key = orders.interrupt()
    more = ["--header", "Location: /orders/1", "--header", "X-Two: a", "--header", "X-Two: b"]
    result = orders.run("resolve", key, *PAID, *more, "--yes")
    assert (result.exit_code, result.output) == (0, f"{key}: every retry gets this 201\n")
    for _ in range(2):
        response = orders.send()
        assert (response.status_code, response.data) == (201, b'{"paid": true}')
        assert response.content_type == "application/json"
        assert response.headers["Location"] == "/orders/1"
        assert response.headers.getlist("X-Two") == ["a", "b"]
        assert response.headers["Idempotent-Replayed"] == "true"
    assert orders.calls == [1]
    (line,) = orders.lines()
    assert (line["state"], line["status"], line["attempt"]) == ("completed", 201, 1)


@EACH
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["resolve", *PAID, "--yes"], 7),
        (["resolve", *PAID, "--yes", "--json"], 8),
        (RELEASE, 7),
        (["show"], 7),
        (["show", "--derive", "refund"], 7),
    ],
)
def test_a_command_sends_few_messages_to_the_database(orders, postgres, command, expected):
    """Four of them once for each process: where the table is, on a connection of our own."""
    key, uri = orders.interrupt(), orders.world.app.config["SQLALCHEMY_DATABASE_URI"]
    with Network(postgres.url) as network:
        app = build(network.through(uri))
        with app.app_context():
            engine = app.extensions["sqlalchemy"].engine
        engine.connect().close()
        (before,) = network.round_trips()
        result = runner(app)(*command, key)
        (after,) = network.round_trips()
        engine.dispose()
    assert (result.exit_code, after - before) == (0, expected), result.output


@EACH
@pytest.mark.parametrize(("usual", "used"), [("off", "on"), ("remote_apply", "remote_apply")])
def test_a_decision_waits_for_the_disk(orders, usual, used):
    key, sql = orders.interrupt(), orders.world.sql
    sql("create table commits as select '' as how where false")
    sql(
        """create function note() returns trigger language plpgsql as $$
        begin insert into commits select current_setting('synchronous_commit'); return new; end $$"""
    )
    sql("create trigger note before update on idempotency_record for each row execute function note()")
    uri = orders.world.app.config["SQLALCHEMY_DATABASE_URI"]
    sql(f"alter database {make_url(uri).database} set synchronous_commit = {usual}")
    result = once(build(uri), "resolve", key, *PAID, "--yes")
    assert (result.exit_code, sql("select how from commits")) == (0, [(used,)])


def test_what_was_released_waits_until_it_has_ended(orders):
    """A decision is not the end: if the client never comes back, somebody must hear of it."""
    key = orders.interrupt()
    assert orders.run(*RELEASE, key).exit_code == 0
    past = "now() - interval '2 days'"
    orders.world.sql(f"update idempotency_record set expires_at = {past}, lease_expires_at = {past}")
    assert orders.run("purge").exit_code == 0
    (line,) = orders.lines()
    assert (line["state"], line["expires"]) == ("interrupted", None)
    assert orders.send().json == {"attempt": 2}


def test_what_was_released_is_open_as_long_as_a_provider_knows_its_key(orders, assert_problem):
    """Counted from the first call. What is older needs a look into the provider's books."""
    key, table = orders.interrupt(), "update idempotency_record set"
    assert orders.run(*RELEASE, key).exit_code == 0
    orders.world.sql(f"{table} created_at = now() - interval '25 hours'")
    orders.world.sql(f"{table} completed_at = now() - interval '2 hours'")
    assert_problem(orders.send(), 409, "operation-interrupted")
    assert orders.calls == [1]
    said = refused(orders.run(*RELEASE, key))
    assert f"{key} began 1 d 1 h ago, and its ttl is 1 d" in said
    assert "say so (--not-done); otherwise do the rest by hand, and resolve it" in said
    shown = " ".join(orders.run("show", key).output.split())
    assert "say so (--not-done)" in shown, "a plain release would be refused"
    assert "recognises the key" not in shown
    assert_problem(orders.send(), 409, "operation-interrupted")
    assert orders.run(*RELEASE, key, "--not-done").exit_code == 0
    orders.world.sql(f"{table} created_at = created_at - interval '25 hours'")
    assert_problem(orders.send(), 409, "operation-interrupted")
    assert orders.run(*RELEASE, key, "--not-done").exit_code == 0
    assert orders.send().json == {"attempt": 2}


def test_what_is_old_may_be_failed_and_resolved(orders):
    key = orders.interrupt()
    orders.world.sql("update idempotency_record set created_at = now() - interval '9 days'")
    assert orders.run(*RELEASE, "--fail", key).exit_code == 0
    assert orders.run("resolve", key, *PAID, "--yes").exit_code == 0


def test_it_asks_first_and_shows_what_it_asks_about(orders):
    key, ask = orders.interrupt(), orders.world.app.test_cli_runner().invoke
    result = ask(cli, ["resolve", key, *PAID], input="n\n")
    assert result.exit_code == 1
    for part in (key, "interrupted", "charge", "HTTP 201 CREATED", '{"paid": true}', "Store it?"):
        assert part in result.output
    assert orders.lines()[0]["state"] == "interrupted"
    assert "Aborted!" in refused(ask(cli, ["resolve", key, *PAID])), "no input is no consent"
    assert ask(cli, ["resolve", key, *PAID], input="y\n").exit_code == 0
    assert orders.send().status_code == 201


def test_without_a_terminal_consent_must_be_given(orders):
    key = orders.interrupt()
    resolve = ["resolve", key, "--status", "201", "--why", WHY]
    result = orders.run(*resolve, "--json")
    assert (result.exit_code, "--yes is needed" in result.output) == (2, True)
    assert "Aborted!" in refused(orders.run(*resolve, "--body", "-"))


def test_the_record_notes_who_decided_and_why(orders):
    key = orders.interrupt()
    began = datetime.now(timezone.utc) - timedelta(seconds=2)
    assert orders.show(key)["audit"] == []
    orders.run("release", key, "--why", "not sent", "--by", "ann")
    assert orders.send().json == {"attempt": 2}
    orders.world.sql("update idempotency_record set state = 'failed', status = 500")
    (line,) = json.loads(orders.run("resolve", key, *PAID, "--yes", "--json").output)
    assert (line["key"], line["state"]) == (key, "completed")
    first, second = orders.show(key)["audit"]
    assert (first["by"], first["did"], first["why"]) == ("ann", "released", "not sent")
    assert (second["by"], second["did"], second["why"]) == (getpass.getuser(), "resolved", WHY)
    assert began <= datetime.fromisoformat(first["at"]) <= datetime.fromisoformat(second["at"])
    assert "ann released not sent" in " ".join(orders.run("show", key).output.split())


@pytest.mark.parametrize(
    ("by", "noted"),
    [
        ("ann\nERROR forged\r\x1b[2J\u2028\u202e\0", "ann ERROR forged  [2J"),
        ("ann \udcff", "ann"),
        (" \n", getpass.getuser()),
        ("\u3164\u0301", getpass.getuser()),
    ],
)
def test_a_name_is_one_line_that_can_be_seen(orders, by, noted):
    key = orders.interrupt()
    assert orders.run("release", "--why=asked", key, "--by", by).exit_code == 0
    assert [entry["by"] for entry in orders.show(key)["audit"]] == [noted]


def test_a_failure_given_by_hand_is_noted_as_one(orders):
    key = orders.interrupt()
    assert orders.run("release", "--why=asked", "--fail", key).exit_code == 0
    (entry,) = orders.show(key)["audit"]
    assert (entry["did"], entry["why"]) == ("failed", "asked")
    assert orders.send().status_code == 500
    orders.run("resolve", key, "--status", "503", "--why", WHY, "--yes")
    assert orders.lines()[0]["state"] == "failed"
    assert (orders.send().status_code, orders.send().data) == (503, b"")


def test_an_earlier_life_of_the_key_is_not_told(orders):
    key = orders.interrupt()
    orders.run("resolve", key, *PAID, "--yes")
    orders.world.sql("update idempotency_record set expires_at = clock_timestamp()")
    with pytest.raises(Killed):
        orders.send()
    assert orders.show(key)["audit"] == []
    orders.run("release", "--why=asked", key)
    assert [entry["did"] for entry in orders.show(key)["audit"]] == ["released"]


def test_what_runs_or_has_ended_is_left_alone(orders):
    def slow() -> Any:
        (line,) = orders.lines()
        assert "in progress: only what is" in refused(
            orders.run("resolve", line["key"], *PAID, "--yes")
        )
        return {}, 201

    orders.world.app.post("/slow", endpoint="slow")(idempotent(atomic=False)(slow))
    assert orders.world.post("/slow").status_code == 201
    (line,) = orders.lines()
    assert "completed: only what is" in refused(orders.run("resolve", line["key"], *PAID, "--yes"))
    assert orders.world.post("/slow").json == {}


def test_a_late_worker_loses(orders):
    def slow() -> Any:
        orders.world.sql("update idempotency_record set lease_expires_at = clock_timestamp()")
        (line,) = orders.lines()
        assert orders.run("resolve", line["key"], *PAID, "--yes").exit_code == 0
        return {"late": True}, 201

    orders.world.app.post("/slow", endpoint="slow")(idempotent(atomic=False)(slow))
    assert orders.world.post("/slow").status_code == 409
    assert orders.world.post("/slow").json == {"paid": True}


def test_what_somebody_works_on_is_left_alone(orders, caplog):
    key = orders.interrupt()
    with orders.world.app.app_context(), orders.world.db.engine.begin() as other:
        other.exec_driver_sql("select 1 from idempotency_record for update")
        assert f"{key} was in use just now" in refused(orders.run("resolve", key, *PAID, "--yes"))
    assert "operator resolved" not in caplog.text
    assert orders.run("resolve", key, *PAID, "--yes").exit_code == 0


def test_of_two_decisions_one_stands(orders):
    key = orders.interrupt()
    with orders.world.app.app_context():
        store = orders.world.app.extensions["idempotency"].records.admin()
        (seen,) = store.lines(2, start=bytes.fromhex(key))
        entry = AuditEntry("ann", "released", "")
        assert store.settle(seen, entry, 60)
        assert not store.settle(seen, entry, 60)
        assert store.erase([seen.hash], seen.version) == 0
    assert orders.run("resolve", key, *PAID, "--yes").exit_code == 0, "its client has not come back"


def die_again(orders: Orders, key: str) -> None:
    """Somebody releases it; the client's retry charges again, and is killed, too."""
    orders.deadly.add(2)
    assert orders.run("release", "--why=asked", key).exit_code == 0
    with pytest.raises(Killed):
        orders.send()


def fail(orders: Orders, key: str) -> None:
    assert orders.run("release", "--why=asked", "--fail", key).exit_code == 0


def renew(orders: Orders, key: str) -> None:
    """Its worker was alive after all, went on, and was killed only then."""
    orders.world.sql("update idempotency_record set lease_expires_at = lease_expires_at + '1 ms'")


@pytest.mark.parametrize(
    ("meanwhile", "state"),
    [
        (die_again, "interrupted now, in attempt 2"),
        (fail, "failed now, in attempt 1"),
        (renew, "interrupted now, in attempt 1"),
    ],
)
def test_who_has_not_seen_the_last_attempt_decides_nothing(orders, monkeypatch, meanwhile, state):
    key = orders.interrupt()
    monkeypatch.setattr(click, "confirm", lambda *_, **__: meanwhile(orders, key))
    result = orders.run("resolve", key, *PAID)
    assert f"somebody was first: {key} is {state}" in refused(result)
    assert orders.lines()[0]["status"] != 201
    assert "resolved" not in [entry["did"] for entry in orders.show(key)["audit"]]


def test_a_command_may_name_the_attempt_that_it_is_about(orders):
    key = orders.interrupt()
    die_again(orders, key)
    for command in RELEASE, [*RELEASE, "--fail"], ["resolve", *PAID, "--yes"]:
        result = orders.run(*command, key, "--attempt", "1")
        assert "interrupted now, in attempt 2. Nothing was done" in refused(result)
    assert orders.run("release", "--why=asked", key, "--attempt", "2").exit_code == 0


def test_what_cannot_be_decided_is_refused_before_anything_is_asked(orders):
    key = orders.interrupt()
    orders.run("resolve", key, *PAID, "--yes")
    result = orders.run("resolve", key, *PAID)
    assert "is completed: only what is" in refused(result)
    assert "Store it?" not in result.output


def test_what_is_given_is_sealed_like_any_response(make_world):
    orders = Orders(make_world(IDEMPOTENCY_ENCRYPTION_KEYS=KEYS))
    key = orders.interrupt()
    assert orders.run("resolve", key, *PAID, "--yes").exit_code == 0
    (record,) = orders.world.records()
    assert (record.headers, bytes(record.body)[:1]) == (None, b"\x01")
    assert orders.send().json == {"paid": True}


def test_without_the_keys_nothing_is_stored_that_no_retry_could_open(make_world):
    orders = Orders(make_world(IDEMPOTENCY_ENCRYPTION_KEYS=KEYS))
    key = orders.interrupt()
    same = orders.world.app.config["SQLALCHEMY_DATABASE_URI"]
    keyless = runner(make_world(SQLALCHEMY_DATABASE_URI=same).app)
    for command in ["resolve", *PAID, "--yes"], [*RELEASE, "--fail"]:
        assert "IDEMPOTENCY_ENCRYPTION_KEYS is empty here" in refused(keyless(*command, key))
    assert orders.lines()[0]["state"] == "interrupted"
    assert keyless("release", "--why=asked", key).exit_code == 0, "stores no response"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--body", "paid"], "the body is not JSON"),
        (["--body", '{"amount": NaN}'], "the body is not JSON"),
        (["--body", "[" * 900 + "]" * 900], "the body is not JSON"),
        (["--header", "Set-Cookie: a=b"], "'Set-Cookie' is malformed, or one that is never stored"),
        (["--header", "nonsense"], "'nonsense' is malformed"),
        (["--header", "X: a\nY: b"], "'X' is malformed"),
        (["--body", "x", "--content-type", "text/plain\nX: y"], "'Content-Type' is malformed"),
        (["--body", "x", "--content-type", "é€"], "'Content-Type' is malformed"),
        (["--body", "x", "--header", "content-type: a/b", "--content-type", "a/b"], "one Content-Type"),
        (
            ["--body", "x", "--header", "Content-Type: a/b", "--header", "Content-Type: a/c"],
            "one Content-Type",
        ),
        (["--body", "\udcff"], "the body is not JSON"),
        (["--status", "204", "--body", "{}"], "the status 204 has no body"),
        (["--body", f'"{"x" * 3000}"'], "larger than IDEMPOTENCY_MAX_RESPONSE_BYTES"),
    ],
)
def test_a_response_that_could_not_be_stored_as_it_is_is_refused(make_world, options, said):
    orders = Orders(make_world(IDEMPOTENCY_MAX_RESPONSE_BYTES=2000))
    key = orders.interrupt()
    result = orders.run("resolve", key, "--status", "201", "--why", WHY, "--yes", *options)
    assert said in refused(result)
    assert orders.lines()[0]["state"] == "interrupted"


def test_a_file_in_another_encoding_is_no_json(orders):
    key, content = orders.interrupt(), '{"paid": true}'.encode("utf-16")
    options = ["--status", "201", "--body", "-", "--why", WHY, "--yes"]
    result = orders.run("resolve", key, *options, input=content)
    assert "the body is not JSON" in refused(result)
    assert orders.lines()[0]["state"] == "interrupted"


def test_a_body_of_another_type_comes_from_a_file(orders):
    key, options = orders.interrupt(), ["--content-type", "image/x", "--why", WHY, "--yes"]
    result = orders.run("resolve", key, "--status", "200", "--body", "-", *options, input=b"\x00\xff")
    assert result.exit_code == 0
    response = orders.send()
    assert (response.data, response.content_type) == (b"\x00\xff", "image/x")


def test_a_content_type_among_the_headers_is_the_only_one(orders):
    key = orders.interrupt()
    options = ["--body", "paid", "--header", "content-type: text/plain", "--why", WHY, "--yes"]
    assert orders.run("resolve", key, "--status", "200", *options).exit_code == 0
    assert orders.send().headers.getlist("Content-Type") == ["text/plain"]


def test_no_decision_is_without_a_reason(orders):
    key = orders.interrupt()
    for command in ["release"], ["release", "--fail"], ["resolve", "--status", "201", "--yes"]:
        result = orders.run(*command, key)
        assert (result.exit_code, "Missing option '--why'" in result.output) == (2, True)
    assert orders.lines()[0]["state"] == "interrupted"


@pytest.mark.parametrize("why", ["", "  ", "\u2003", "\u200b", "\ufe0f", 501 * "x"])
def test_a_reason_that_says_nothing_or_is_long_is_refused(orders, why):
    key = orders.interrupt()
    for command in ["release"], ["release", "--fail"], ["resolve", *PAID, "--yes"]:
        result = orders.run(*command, key, "--why", why)
        assert (result.exit_code, "Say why, in at most 500" in result.output) == (1, True)
    assert orders.lines()[0]["state"] == "interrupted"


def test_no_status_is_given_that_ends_nothing(orders):
    for status in "100", "199", "600":
        result = orders.run("resolve", "0" * 8, "--status", status, "--why", WHY, "--yes")
        assert result.exit_code == 2


def test_garbage_in_the_audit_is_not_shown(orders):
    key = orders.interrupt()
    for garbage in '{"a": 1}', "[1]", '"x"', '[{"at": 1}]', "null":
        orders.world.sql("update idempotency_record set audit = :value", value=garbage)
        assert orders.show(key)["audit"] == []
