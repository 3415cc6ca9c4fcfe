"""While somebody else holds the table, as a migration does, no operator waits for it, and no page."""

from __future__ import annotations

import pytest

from tests.integration.commands.purging import outside
from tests.integration.commands.running import build_console, runner

PATIENT = "statement timeout"  # what the server says to those that would wait for ever


@pytest.fixture
def world(make_world):
    """With a limit far above ours, so that what has none fails instead of hanging."""
    options = {"connect_args": {"options": "-c statement_timeout=3000"}}
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=options)
    build_console(world.app)
    return world


@pytest.fixture
def locked(world):
    with outside(world) as migration:
        migration.execute("lock table idempotency_record")
        yield


@pytest.mark.parametrize(
    "command",
    [
        "list", "list --state interrupted", "list --operation pay",
        "list --scope alice", "list --key k --operation pay", "show 12345678",
        "release 12345678 --why known",
        "resolve 12345678 --status 200 --why known --yes", "forget --scope alice --yes",
        "purge",
    ],
)  # fmt: skip
def test_a_command_gives_up(world, locked, command):
    result = runner(world.app)(*command.split())
    assert result.exit_code == 1
    assert "canceling statement due to lock timeout" in result.output


def test_an_index_does_not_wait_for_a_view_with_requests_behind_it(world):
    world.sql("drop index ix_idempotency_record_expires_at")
    with outside(world) as view:
        view.execute("lock table idempotency_record in row exclusive mode")
        result = runner(world.app)("create-table")
    assert result.exit_code == 1
    assert "canceling statement due to lock timeout" in result.output


def test_check_says_that_the_table_is_locked(world, locked):
    result = runner(world.app)("check")
    assert result.exit_code == 1
    assert "canceling statement due to lock timeout" in result.output
    assert "that no migration holds the table" in result.output
    assert PATIENT not in result.output


@pytest.mark.parametrize(
    "page",
    ["", "records", "records?state=interrupted", "records?operation=pay", "records/12345678"],
)
def test_a_page_gives_up(world, locked, page):
    response = world.app.test_client().get(f"/operations/{page}")
    assert response.status_code == 503
    assert "canceling statement due to lock timeout" in response.text
