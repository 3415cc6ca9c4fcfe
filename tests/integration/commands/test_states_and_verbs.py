"""What operators see and decide, on each store: in which state which command does what."""

from __future__ import annotations

import getpass
import json
from datetime import datetime
from typing import Any

import click
import pytest
import redis
import sqlalchemy as sa

import servers
from flask_idempotency import current_operation, idempotent
from tests.contract.in_redis import rewrite
from tests.drivers import EACH
from tests.integration.commands.running import ANSWER, APART, build, findings, not_ok, once, runner
from tests.integration.commands.shop import KEY, Shop
from tests.killed import Killed

GIVEN = ["--status=201", '--body={"paid": 1}', "--header=X-A: b"]
VERBS: dict[str, list[str]] = {
    "release": ["release"],
    "fail": ["release", "--fail"],
    "resolve": ["resolve", *GIVEN, "--yes"],
}
DECIDED = {
    "release": ("may be run again; until then it is listed as interrupted", "released", "interrupted"),
    "fail": ("failed for good", "failed", "failed"),
    "resolve": ("every retry gets this 201", "resolved", "completed"),
}
STATES = {
    "order": "interrupted",
    "wrong": "failed",
    "half": "failed",  # after a step: it waits for a decision
    "ok": "completed",
    "free": "released",
    "seen": "observed",
    "slow": "in progress",
}
"""The state in which a view of the shop leaves its record."""


STORES = ["postgres", "sql", "redis"]
PAST = "'2000-01-01 00:00:00.000'"


@pytest.fixture(params=STORES, scope="module")
def store(request: pytest.FixtureRequest) -> Any:
    return request.param


def on(*stores: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("store", stores, indirect=True)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """What the log has heard of operators."""
    return lambda: [each.getMessage() for each in caplog.records if hasattr(each, "did")]


def meanwhile(shop: Shop, name: str, does: Any) -> None:
    """Bring a record about, and do something with it: while it runs, if it is to be in progress."""
    if name == "slow":
        failures: list[BaseException] = []

        def during() -> None:
            try:
                does()
            except AssertionError as error:
                failures.append(error)

        shop.during = during
        assert shop.post(name).status_code == 201
        assert failures == []
    else:
        shop.post(name)
        does()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", STATES)
def test_an_operator_decides_about_what_is_interrupted_or_failed(shop, logged, name, verb):
    words, did, after = DECIDED[verb]

    def decide() -> None:
        digits = shop.digits(name)
        before = shop.show(digits)
        assert before["state"] == STATES[name].replace(" ", "_")
        result = shop.run(*VERBS[verb], "--why=paid é\nERROR", digits, "--by=ann")
        found = shop.show(digits)
        if STATES[name] not in ("interrupted", "failed"):
            assert (result.exit_code, found, logged()) == (1, before, [])
            only = f"{digits} is {STATES[name]}: only what is interrupted or failed can be {did}"
            assert only in result.output
            return
        assert (result.exit_code, result.output) == (0, f"{digits}: {words}\n")
        assert (found["state"], found["attempt"], found["steps"]) == (after, 1, before["steps"])
        assert (found["expires"] is None) is (verb == "release")
        (entry,) = found["audit"]
        assert (entry["by"], entry["did"], entry["why"]) == ("ann", did, "paid é\nERROR")
        assert found["created"] <= entry["at"]
        status = {"release": "", "fail": "status 500, ", "resolve": "status 201, "}[verb]
        told = f"operation {name}, id {digits}, {status}origin cli, by ann, why paid é"
        assert logged() == [rf"operator {did}: {told}\nERROR"]
        first, second = shop.post(name), shop.post(name)
        assert (first.status_code, first.data) == (second.status_code, second.data)
        assert second.headers["Idempotent-Replayed"] == "true"
        assert shop.show(digits)["attempt"] == (2 if verb == "release" else 1)
        assert len(shop.calls) == (name in ("order", "half"))
        if verb == "fail":
            assert first.status_code == 500
            assert first.json["type"].endswith("operation-failed")
        if verb == "resolve":
            assert (first.json, first.headers["X-A"]) == ({"paid": 1}, "b")

    meanwhile(shop, name, decide)


def test_a_scope_is_listed_and_erased_except_what_runs_or_waits(shop, logged):
    def forget() -> None:
        listed = shop.rows("list", "--scope", "alice")
        assert {line["operation"] for line in listed} == STATES.keys()
        of_ok = ["--scope", "alice", "--operation", "ok"]
        assert len(shop.rows("list", *of_ok)) == 1
        assert shop.rows("list", *of_ok, "--state", "failed", code=1) == []
        nothing = dict.fromkeys(("erased", "in_progress", "interrupted", "failed"), 0)
        assert shop.rows("forget", "--scope", "nobody", "--yes", code=1) == [nothing]
        assert shop.rows("forget", *of_ok, "--yes")[0]["erased"] == 1
        rest = {"erased": 3, "in_progress": 1, "interrupted": 1, "failed": 1}
        assert shop.rows("forget", "--scope", "alice", "--yes") == [rest]
        by = f"origin cli, by {getpass.getuser()}"
        told = [line.partition("records ")[2] for line in logged()]
        assert told == [f"1, {by}", f"3, {by}"]

    shop.post("ok", user="bob")
    for name in STATES.keys() - {"slow"}:
        shop.post(name)
    meanwhile(shop, "slow", forget)
    left = {(line["operation"], line["state"]) for line in shop.rows("list")}
    waiting, of_bob = {("order", "interrupted"), ("half", "failed")}, ("ok", "completed")
    assert left == waiting | {("slow", "completed"), of_bob}


def test_show_tells_how_far_it_came_and_what_was_decided_before(shop):
    digits = shop.begun("order")
    assert shop.post("order").status_code == 409
    (line,) = shop.rows("list", "--state", "interrupted")
    record = shop.show(digits)
    (step,) = record.pop("steps")
    assert (record.pop("audit"), record) == ([], line)
    assert (line["key"], line["operation"], line["attempt"]) == (digits, "order", 1)
    values = [line[name] for name in ("status", "bytes", "completed", "expires", "expired")]
    assert values == [None, None, None, None, False], "what is interrupted does not expire"
    assert (step["name"], step["attempt"], json.loads(step["result"])) == ("charge", 1, ANSWER)
    assert line["created"] <= step["finished"]
    shop.deadly = {1, 2}
    for why in "1", "2":
        shop.run("release", digits, "--why", why)
        assert shop.show(digits)["completed"] is None
        shop.post("order")
    line = shop.show(digits)
    assert [entry["why"] for entry in line["audit"]] == ["1", "2"]
    assert (line["state"], line["status"], line["attempt"]) == ("completed", 201, 3)
    assert line["created"] <= line["completed"] < line["expires"]


@on("postgres")
def test_what_was_released_is_open_as_long_as_a_provider_knows_its_key(shop, assert_problem):
    """Counted from the first call. What is older needs a look into the provider's books."""
    digits = shop.begun("order")
    release = ["release", digits, "--why=asked"]

    def grow_old() -> None:
        shop.sql("update idempotency_record set created_at = now() - interval '25 hours'")
        assert_problem(shop.post("order"), 409, "operation-interrupted")

    created = "select created_at from idempotency_record"
    began = shop.sql(created)
    assert shop.run(*release).exit_code == 0
    assert shop.sql(created) == began, "only --not-done begins its age anew"
    shop.sql("update idempotency_record set completed_at = now() - interval '2 hours'")
    grow_old()
    result = shop.run(*release)
    assert result.exit_code == 1
    assert f"{digits} began 1 d 1 h ago, and its ttl is 1 d" in result.output
    assert "say so (--not-done); otherwise do the rest by hand, and resolve" in result.output
    shown = " ".join(shop.run("show", digits).output.split())
    assert "say so (--not-done)" in shown, "a plain release would be refused"
    assert "recognises the key" not in shown
    assert shop.run(*release, "--not-done").exit_code == 0
    grow_old()
    assert shop.run(*release, "--fail").exit_code == 0, "it may be failed, however old it is"
    assert shop.post("order").status_code == 500
    assert shop.run(*release, "--not-done").exit_code == 0
    assert shop.post("order").json == {"attempt": 2}


@on("postgres", "sql")
def test_what_was_released_waits_until_it_has_ended(shop):
    """A decision is not the end: if the client never comes back, somebody must hear of it."""
    digits = shop.begun("order")
    assert shop.run("release", "--not-done", "--why=asked", digits).exit_code == 0
    shop.sql(f"update idempotency_record set expires_at = {PAST}, lease_expires_at = {PAST}")
    assert shop.run("purge").output == "0 expired records deleted\n"
    assert "interrupted" in shop.run("list").output
    assert shop.post("order").json == {"attempt": 2}


def dies_again(shop: Shop, digits: str) -> None:
    """Somebody releases it; the client's retry charges again, and is killed, too."""
    shop.deadly = {1, 2}
    assert shop.run("release", "--why=asked", digits).exit_code == 0
    assert shop.post("order") is None


def is_failed(shop: Shop, digits: str) -> None:
    assert shop.run("release", "--why=asked", "--fail", digits).exit_code == 0


def is_renewed(shop: Shop, _digits: str) -> None:
    """The worker was alive after all, went on, and was killed only then."""
    shop.sql(f"update idempotency_record set lease_expires_at = {PAST}")


@pytest.mark.parametrize(
    ("store", "meanwhile", "state"),
    [
        *((store, dies_again, "interrupted now, in attempt 2") for store in STORES),
        *((store, is_failed, "failed now, in attempt 1") for store in STORES),
        *((store, is_renewed, "interrupted now, in attempt 1") for store in ("postgres", "sql")),
    ],
    indirect=["store"],
    scope="module",  # the fixture's: pytest 8.0 does not find that out beside other arguments
)
def test_who_has_not_seen_the_last_version_decides_nothing(shop, monkeypatch, meanwhile, state):
    digits = shop.begun("order")
    monkeypatch.setattr(click, "confirm", lambda *_, **__: meanwhile(shop, digits))
    result = shop.run("resolve", *GIVEN, "--why=asked", digits)
    assert result.exit_code == 1
    assert f"{digits} is {state}. That is not what you have seen" in result.output
    found = shop.show(digits)
    assert found["status"] != 201
    assert "resolved" not in [entry["did"] for entry in found["audit"]]


@on("postgres")
def test_what_somebody_works_on_is_left_alone(shop, logged):
    digits = shop.begun("order")
    resolve = ["resolve", digits, *GIVEN, "--why=asked", "--yes"]
    with shop.app.app_context(), shop.db.engine.begin() as other:
        other.exec_driver_sql("select 1 from idempotency_record for update")
        result = shop.run(*resolve)
    assert (result.exit_code, f"{digits} was in use just now" in result.output) == (1, True)
    assert logged() == []
    assert shop.run(*resolve).exit_code == 0


@EACH
@on("postgres")
@pytest.mark.parametrize(("usual", "used"), [("off", "on"), ("remote_apply", "remote_apply")])
def test_a_decision_waits_for_the_disk(world, pay, usual, used):
    def die() -> None:
        raise Killed

    world.app.view_functions["pay"] = idempotent(atomic=False)(die)
    with pytest.raises(Killed):
        pay()
    world.sql(
        "create table commits as select '' as how where false;"
        " create function note() returns trigger language plpgsql as $$ begin"
        " insert into commits select current_setting('synchronous_commit'); return new; end $$;"
        " create trigger note before update on idempotency_record for each row execute function note()"
    )
    uri = sa.make_url(world.app.config["SQLALCHEMY_DATABASE_URI"])
    world.sql(f"alter database {uri.database} set synchronous_commit = {usual}")
    digits = world.records()[0].key[:4].hex()
    result = once(build(uri), "resolve", digits, *GIVEN, "--why=asked", "--yes")
    assert (result.exit_code, world.sql("select how from commits")) == (0, [(used,)])


def test_the_record_of_a_key_is_erased_only_as_it_was_shown(shop, logged, monkeypatch):
    shop.post("free")
    monkeypatch.setattr(click, "confirm", lambda *_, **__: shop.post("free"))
    result = shop.run("forget", *shop.of("free"))
    assert "free       released" in result.output
    again = "1 record left, in progress, or changed since it was counted: run this again later\n"
    assert result.output.endswith(f"0 records erased\n{again}")
    monkeypatch.setattr(click, "confirm", lambda *_, **__: True)
    digits = shop.digits("free")
    assert shop.run("forget", *shop.of("free"), "--by=bob").output.endswith("1 record erased\n")
    erased = f"operator erased: operation free, id {digits}, records 1, origin cli, by bob"
    assert (shop.rows("list"), logged()) == ([], [erased])


@pytest.mark.parametrize("verb", ["release", "resolve"])
def test_a_late_worker_loses_against_an_operator(shop, verb):
    def decide() -> None:
        current_operation.steps._lease.abandon()  # as if the lease were over
        assert shop.run(*VERBS[verb], "--why=asked", shop.digits("slow")).exit_code == 0

    shop.during = decide
    assert shop.post("slow").status_code == 409
    found = shop.show(shop.digits("slow"))
    assert (found["state"], found["attempt"]) == (DECIDED[verb][2], 1)
    shop.during = dict
    assert shop.post("slow").json == ({"late": True} if verb == "release" else {"paid": 1})


def test_what_an_operator_released_is_not_forgotten_if_its_view_gives_it_back(shop):
    """No step has finished; but what was cut off may have happened, and only the operator knows."""
    digits = shop.begun("cut")
    assert shop.run("release", "--why=asked", digits).exit_code == 0
    assert shop.post("cut").status_code == 503
    found = shop.show(digits)
    assert (found["state"], found["expires"], found["attempt"]) == ("interrupted", None, 2)


@pytest.mark.parametrize(
    ("verb", "name", "days"), [("fail", "long", 7), ("resolve", "long", 7), ("resolve", "brief", 1)]
)
def test_a_decision_lives_for_the_ttl_of_its_route_or_the_application(shop, verb, name, days):
    """The longer of the two, after which a retry would run what is never to run again."""
    digits = shop.begun(name)
    assert shop.run(*VERBS[verb], "--why=asked", digits).exit_code == 0
    found = shop.show(digits)
    # Without the Z, which Python 3.10 does not read.
    created, expires = (datetime.fromisoformat(found[name][:-1]) for name in ("created", "expires"))
    assert -60 < (expires - created).total_seconds() - days * 86400 < 60


def test_where_the_result_of_a_step_is_lost_nobody_is_advised_to_release(shop):
    digits = shop.begun("lost")
    shown = shop.run("show", digits).output
    assert "The result of charge could not be stored: do not release it" in shown
    assert "repeats no finished step" not in shown
    shop.run("release", "--why=asked", digits)
    assert shop.post("lost").status_code == 500


def test_list_shows_the_newest_first_counts_all_and_says_what_waits(shop, store):
    assert shop.run("list").output == "no records\n"
    for name in STATES:
        shop.post(name)
    lines = shop.rows("list")
    assert sorted(line["operation"] for line in lines) == sorted(STATES)
    created = [line["created"] for line in lines]
    assert created == sorted(created, reverse=True)
    assert [line["state"] for line in shop.rows("list", "--operation", "wrong")] == ["failed"]
    assert shop.rows("list", "--operation", "ok", "--state", "failed") == []
    for state in "interrupted", "observed":
        assert [line["state"] for line in shop.rows("list", "--state", state)] == [state]
    more = "only the newest 2: there are more, see --limit\n"
    result = runner(shop.app, **APART)("list", "--json", "--limit", "2")
    assert [line["created"] for line in json.loads(result.stdout)] == created[:2]
    assert result.stderr == more
    output = shop.run("list", "--limit", "2").stdout
    assert more in output
    text = output.splitlines()
    head = [lines[0]["key"], lines[0]["operation"], lines[0]["state"], "1"]
    assert text[1].split()[:4] == head
    counts = "2 completed, 2 failed, 1 interrupted, 1 observed, 1 released"
    assert text[5] == f"7 records in all: {counts}"
    assert text[6].startswith("waiting for a retry or an operator: 2, the oldest for ")
    assert text[7] == "waiting for a purge: 0"
    assert "there are more" not in shop.run("list", "--limit", "7").output
    if store != "redis":
        shop.sql(f"update idempotency_record set expires_at = {PAST} where name <> 'half'")
        expired = {line["operation"] for line in shop.rows("list") if line["expired"]}
        assert expired - {"seen"} == {"wrong", "ok", "free", "slow"}, "what waits does not expire"
        assert "waiting for a purge: 4, the oldest for " in shop.run("list").output
        assert shop.rows("purge") == [{"deleted": 5}]
    assert shop.run("purge").output == "0 expired records deleted\n"
    assert {"order", "half"} <= {line["operation"] for line in shop.rows("list")}


def test_no_command_shows_a_key_a_response_or_a_password(shop):
    """Only `show` has a step's result."""
    key, order = shop.begun("ok"), shop.begun("order")
    commands = ["list", "list --json", f"show {key}", f"show {key} --json", "check", "purge"]
    output = "".join(shop.run(*command.split()).output for command in commands)
    assert key in output
    (hashed,) = shop.app.extensions["idempotency"].records.admin().lines(1, start=bytes.fromhex(key))
    for secret in KEY, ANSWER, "alice", hashed.hash.hex()[:9], hashed.version.split()[0]:
        assert secret not in output
    for setting in ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_REDIS_URL"):
        if password := sa.make_url(shop.app.config.get(setting) or "sqlite://").password:
            assert password not in output
    assert len(shop.show(order)["steps"][0]["derived_key"]) == 43


def test_check_passes_a_healthy_application_and_leaves_nothing(shop, store):
    result = shop.run("check")
    assert not_ok(result).keys() <= {"persistence"}  # the tests' Redis keeps nothing on disk
    there = {
        "postgres": ["PostgreSQL", "driver", "db.session", "claim", "own pool"],
        "sql": ["SQLite", "db.session", "claim", "own pool"],
        "redis": ["Redis", "persistence", "claim"],
    }
    assert list(findings(result)) == [*there[store], "scope", "routes"]
    assert "11 of 11 endpoints that change something are protected; 1 only observed: seen" in (
        result.output
    )
    assert shop.rows("list") == []


def test_check_counts_what_is_encrypted_by_key_and_misses_keys(
    shop, store, tmp_path_factory, redis_server
):
    """Whoever takes a key away must know whether anything is left under it, steps included."""
    folder = tmp_path_factory.mktemp("sealed")
    config = {"IDEMPOTENCY_REDIS_PREFIX": shop.app.config["IDEMPOTENCY_REDIS_PREFIX"]}
    uri = shop.app.config["SQLALCHEMY_DATABASE_URI"]

    def encryption(shop: Shop, *, code: int = 0) -> str:
        found = {each["subject"]: each for each in shop.rows("check", code=code)}
        return f"{found['encryption']['level']} {found['encryption']['text']}"

    first, second, both = (
        Shop(store, folder, redis_server.url, uri, **config, IDEMPOTENCY_ENCRYPTION_KEYS=keys)
        for keys in ([bytes(32)], [b"k" * 32], [b"k" * 32, bytes(32)])
    )
    first.post("ok", "a"), first.post("ok", "b"), second.post("ok", "c"), first.post("order", "d")
    counted = "ok responses and steps under each key, newest first:"
    assert encryption(both).startswith(f"{counted} 1, 3 (")
    for without, count in ((second, 3), (first, 1), (shop, 4)):
        lost = f"{count} responses or steps are encrypted under a key that this process does not have"
        assert encryption(without, code=1) == f"FAILED {lost}"
    if store != "redis":
        shop.sql(f"update idempotency_record set expires_at = {PAST}")
        assert encryption(both).startswith(f"{counted} 0, 1 ("), "no retry needs what has expired"
    shop.begin()
    shop.post("ok", "plain")
    plain = "FAILED 1 responses or steps are not encrypted, so retries get 500"
    assert encryption(first, code=1) == plain
    for each in first, second, both:
        each.close()


@on("redis")
def test_what_is_no_record_of_ours_in_redis_is_not_shown_and_hides_no_other(shop, redis_server):
    prefix = shop.app.config["IDEMPOTENCY_REDIS_PREFIX"]
    assert shop.run("create-table").output == "idempotency_record: nothing to do\n"
    shop.post("ok", "forged")
    with redis.Redis.from_url(redis_server.url) as client:
        (name,) = client.keys("*record:*")
        shop.post("ok", "usual")
        client.set(name + b"0", "somebody's")
        client.set(f"{prefix.replace('[*]', '*')}record:{'0' * 64}", "another application's")
        client.set(f"{prefix}{'0' * 64}", "a lock")
        assert len(shop.rows("list")) == 2
        rewrite(client, name, created=1e300)
        assert "1 record in all: " in shop.run("list").output
        for digit in b"0123456789abcdef":  # wherever the server lists them
            client.rpush(name[:-64] + bytes([digit]) * 64, "no record")
        assert len(shop.rows("list")) == 1
    assert shop.run("show", "00000000").exit_code == 1


def test_redis_that_is_full_or_forgets_does_not_pass(tmp_path):
    with servers.Redis() as server:
        shop = Shop("redis", tmp_path, server.url)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "volatile-lru")
            assert not_ok(shop.run("check"))["memory"] == "FAILED"
            client.config_set("maxmemory-policy", "noeviction")
            assert "memory" not in not_ok(shop.run("check"))
            client.replicaof("127.0.0.1", servers.free_port())
            assert not_ok(shop.run("check"))["claim"] == "FAILED"
        server.stop()
        assert not_ok(shop.run("check")) == {"claim": "FAILED", "deletion": "FAILED"}
        result = shop.run("list")
        assert (result.exit_code, result.output.count("\n")) == (1, 1)
        assert "refused" in result.output
        assert server.password not in result.output
