"""The group of commands: where it is found, what it explains, what it says of what is missing."""

from __future__ import annotations

import configparser

import pytest
from flask import Flask

import servers
from flask_idempotency.cli import cli
from tests.integration.commands.running import ROOT, build, once, runner


def test_the_entry_point_is_the_group():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    point = setup["options.entry_points"]["flask.commands"]
    assert point.split() == ["idempotency", "=", "flask_idempotency.cli:cli"]


def test_every_command_explains_itself():
    run = runner(Flask("any"))
    tables = {"create-table", "check", "purge"}
    records = {"list", "show", "release", "resolve", "forget"}
    assert set(cli.commands) == tables | records
    for name in cli.commands:
        assert name in run("--help").output
        assert len(run(name, "--help").output) > 300


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_an_application_without_the_extension_is_told_so(command):
    needed = {"show": ["0123abcd"], "release": ["0123abcd", "--why", "asked"]}
    needed["forget"] = ["--scope", "1", "--yes"]
    needed["resolve"] = ["0123abcd", "--status", "201", "--why", "asked", "--yes"]
    result = runner(Flask("bare"))(command, *needed.get(command, []))
    assert result.exit_code == 1
    assert result.output.startswith("Error: this application has no Idempotency: call")


@pytest.mark.parametrize("command", ["list", "purge"])
def test_a_missing_table_is_named_with_its_cure(world, run, command):
    world.sql("drop table idempotency_record")
    result = run(command)
    assert result.exit_code == 1
    assert "Error: the table idempotency_record is missing or not up to date" in result.output
    assert "flask idempotency create-table" in result.output


@pytest.mark.parametrize("command", ["create-table", "list", "purge"])
def test_without_postgres_a_command_says_so_in_one_line(command):
    port = servers.free_port()
    result = once(build(f"postgresql+psycopg2://me:hush@127.0.0.1:{port}/shop"), command)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    assert "refused" in result.output
    assert "hush" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        "list --limit 99999999999999999999",
        "purge --every inf",
        "purge --every nan",
        "purge --every 1e300",
    ],
)
def test_a_number_that_is_out_of_range_is_refused_at_the_option(world, run, arguments):
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments.split()[1]}'" in result.output
