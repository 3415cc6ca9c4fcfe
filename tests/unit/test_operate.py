"""``make bench ARGS=--operate`` leaves no command out."""

from bench.operate import COMMANDS
from flask_idempotency.cli import cli


def test_every_command_is_run_on_a_large_table():
    assert {command.line.split()[0] for command in COMMANDS} == set(cli.commands)
