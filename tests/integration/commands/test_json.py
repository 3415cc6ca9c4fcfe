"""Each command with ``--json`` writes one list of rows, and nothing else."""

from __future__ import annotations

import json

import pytest

from flask_idempotency import idempotent
from flask_idempotency.cli import cli
from tests.integration.commands.purging import EXPIRE, FILL
from tests.killed import Killed
from tests.web.leased.records import end_lease


def rows(run, *arguments, code=0):
    result = run(*arguments, "--json")
    assert result.exit_code == code
    return json.loads(result.output)  # both streams


@pytest.mark.parametrize("name", sorted(set(cli.commands)))
def test_every_command_has_it(name):
    assert "--json" in [option for each in cli.commands[name].params for option in each.opts]


def test_a_check_is_a_row_for_each_finding(run, world):
    found = rows(run, "check")
    assert all(set(each) == {"level", "subject", "text", "remedy"} for each in found)
    assert "claim" in [each["subject"] for each in found if each["level"] == "ok"]
    world.sql("drop table idempotency_record cascade")
    failed = [each for each in rows(run, "check", code=1) if each["level"] == "FAILED"]
    assert all(each["remedy"] for each in failed)


def test_what_was_created_is_a_row_each(run, world):
    assert rows(run, "create-table") == []
    world.sql("drop index ix_idempotency_record_expires_at")
    done = [
        {"table": "idempotency_record", "done": "created the index ix_idempotency_record_expires_at"}
    ]
    assert rows(run, "create-table") == done


def test_a_released_operation_is_its_row(world, run):
    @world.app.post("/payments")
    @idempotent(atomic=False)
    def charge():
        raise Killed

    with pytest.raises(Killed):
        world.post()
    end_lease(world)
    digits = rows(run, "list")[0]["key"]
    (released,) = rows(run, "release", "--why=asked", digits)
    assert (released["key"], released["state"]) == (digits, "interrupted")


def test_a_purge_is_a_row(world, run):
    world.sql(FILL.format(3))
    world.sql(EXPIRE)
    assert rows(run, "purge") == [{"deleted": 3}]
