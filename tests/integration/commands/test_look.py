"""``flask idempotency list``: what it shows and counts, and what no command shows."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import sqlalchemy as sa

from flask_idempotency.cli.listing import summary
from flask_idempotency.stores.admin import CAPPED, Overview
from tests.integration.commands.running import ANSWER
from tests.integration.commands.test_overview import fill

KEY = "canary-key-7f3a"

EXPIRE_OLDEST = """update idempotency_record set expires_at = clock_timestamp()
 where key = (select key from idempotency_record order by created_at limit 1)"""


def test_list_shows_the_newest_first_and_filters(world, run, pay):
    for number in range(5):
        pay(key=f"key-{number}")
    world.sql(EXPIRE_OLDEST)

    def listed(*options: str) -> Any:
        return json.loads(run("list", "--json", *options).output)

    everything = listed()
    digests = [bytes(row.key).hex()[:8] for row in world.records()]
    assert [line["key"] for line in everything] == digests[::-1]
    assert [line["expired"] for line in everything] == [False] * 4 + [True]
    result = run("list", "--json", "--limit", "2")
    assert json.loads(result.stdout) == everything[:2]
    more = "only the newest 2: there are more, see --limit\n"
    assert result.stderr == more
    assert more in run("list", "--limit", "2").stdout
    assert "there are more" not in run("list", "--limit", "5").output
    assert listed("--operation", "pay", "--state", "completed") == everything
    assert listed("--operation", "nothing") == listed("--state", "in_progress") == []
    newest = everything[0]
    assert (newest["operation"], newest["state"], newest["attempt"]) == ("pay", "completed", 1)
    assert (newest["status"], newest["bytes"]) == (201, len(pay(key="key-4").data))
    assert newest["created"] <= newest["completed"] <= newest["expires"]
    lines = run("list").output.splitlines()
    assert lines[0].split()[:5] == ["key", "operation", "state", "attempt", "status"]
    assert lines[1].split()[0] == digests[-1]
    assert run("list", "--state", "unheard-of").exit_code == 2
    assert run("list", "--limit", "0").exit_code == 2


def test_list_ends_with_what_there_is_in_all_and_what_waits(world, run):
    assert run("list").output == "no records\n"
    fill(world, 1, 3)
    fill(world, 4, 5, state="'in_progress'", lease="clock_timestamp() - interval '3 h'")
    fill(world, 6, 6, state="'in_progress'", lease="clock_timestamp() + interval '3 h'")
    fill(world, 7, 7, name="'order'", expires="now() - interval '3 days'")
    world.sql("update idempotency_record set created_at = now() - interval '3 h'")
    expected = [
        "",
        "7 records in all: 4 completed, 2 interrupted, 1 in_progress",
        "waiting for a retry or an operator: 2, the oldest for 3 h",
        "waiting for a purge: 1, the oldest for 3 d",
    ]
    for options in ["--limit=1"], ["--operation=order"], ["--state=failed"]:
        lines = run("list", *options).output.splitlines()
        assert lines[-4:] == expected
        assert len(lines) <= 7, "all are counted, not only those that are listed"
    assert "in all" not in run("list", "--scope=alice").output
    assert "in all" not in run("list", "--key=a", "--operation=pay").output


def test_an_estimate_and_a_limit_are_told_as_such():
    found = Overview({"pay": Counter(completed=1_000_000)}, True, CAPPED, None, 0, None)
    assert summary(found) == [
        "",
        "about 1,000,000 records in all: 1,000,000 completed",
        "waiting for a retry or an operator: 10,000 or more",
        "waiting for a purge: 0",
    ]


def test_no_command_shows_a_key_or_a_response(world, run, pay):
    pay(key=KEY, user="canary-user-55d0")
    (record,) = world.records()
    world.sql("update idempotency_record set expires_at = now()")
    commands = ["list", "list --json", "check", "create-table", "purge"]
    output = "".join(run(*command.split()).output for command in commands)
    assert bytes(record.key).hex()[:8] in output
    for secret in (KEY, ANSWER, "canary-user-55d0", bytes(record.key).hex()[:9], record.owner):
        assert secret not in output
    for setting in ("SQLALCHEMY_DATABASE_URI", "IDEMPOTENCY_REDIS_URL"):
        if url := world.app.config.get(setting):
            assert sa.make_url(url).password not in output


def test_nothing_of_the_table_reaches_the_terminal_as_an_instruction(world, run, pay):
    """Titles, colours, line breaks, text that runs from right to left: anybody may write there."""
    odd = "\x1b]0;title\x07\x9b31m\r\nDEL\x7f\u202eübel"
    pay()
    world.sql("update idempotency_record set name = :odd, state = 'x\x1b[2J'", odd=odd)
    world.sql("update idempotency_record set steps = json_build_object(cast(:odd as text),"
              " json_build_object('attempt', 1, 'at', 'now', 'result', 'x'))", odd=odd)  # fmt: skip
    digits = bytes(world.records()[0].key).hex()[:8]
    shown = r"\x1b]0;title\x07\x9b31m\r\nDEL\x7f\u202eübel"
    for command in "list", f"show {digits}":
        output = run(*command.split()).stdout
        assert output.count(shown) == (2 if command.startswith("show") else 1)
        assert all(line.isprintable() for line in output.split("\n"))
        (line,) = json.loads(run(*command.split(), "--json").stdout)
        assert line["operation"] == odd
    failed = run("release", "--why=asked", digits)
    assert r"x\x1b[2J: only what is" in failed.output
    assert all(line.isprintable() for line in failed.output.split("\n"))


def test_times_that_python_does_not_have_are_shown_as_text(world, run, pay):
    odd = {"expires_at": "200000-01-01", "completed_at": "0044-01-01 BC", "created_at": "infinity"}
    for column, time in odd.items():
        pay(key=column)
        world.sql(f"update idempotency_record set {column} = '{time}' where created_at ="
                  " (select max(created_at) from idempotency_record)")  # fmt: skip
    pay(key="usual")
    lines = json.loads(run("list", "--json").output)
    assert [line["created"][:2] for line in lines] == ["in", "20", "20", "20"]
    assert {line["expires"][:6] for line in lines} == {"200000", lines[1]["expires"][:6]}
    assert [line["completed"] for line in lines if "BC" in line["completed"]] == [
        "0044-01-01 00:00:00.000000 BC"
    ]
    for line in lines:
        assert run("show", line["key"]).output.splitlines()[1].startswith(line["key"])
    assert "4 records in all" in run("list").output


def test_more_digits_tell_two_records_apart_that_share_eight(world, run, pay):
    pay()
    (record,) = world.records()
    twin = bytes(record.key)[:4] + bytes(28)
    world.sql("update idempotency_record set state = 'failed'")
    world.sql("insert into idempotency_record select :twin, expires_at, created_at, completed_at, null,"
              " attempt, fingerprint_version, status, state, 'twin', name, fingerprint, headers, body"
              " from idempotency_record", twin=twin)  # fmt: skip
    for command in ["show"], ["release", "--why=asked"]:
        result = run(*command, twin[:4].hex())
        assert result.exit_code == 1
        assert "more than one record" in result.output
        assert twin[:8].hex() in result.output
        assert bytes(record.key)[:8].hex() in result.output
    shown = json.loads(run("show", twin[:8].hex(), "--json").output)
    assert [line["key"] for line in shown] == [twin[:4].hex()], "as list shows it"
    released = run("release", "--why=asked", twin[:8].hex())
    assert (
        released.output
        == f"{twin[:4].hex()}: may be run again; until then it is listed as interrupted\n"
    )
    assert [row.state for row in world.records()].count("failed") == 1
