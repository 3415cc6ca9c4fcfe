"""A server that a test may stop, a way to the database that breaks, and what is expected of both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import servers
from tests.integration.postgres_faults.faults import new_name
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def own_postgres():
    """A server that a test may stop; it runs again at the beginning of the next."""
    with servers.Postgres(fsync=False) as server:
        yield server


@pytest.fixture
def own_database(own_postgres):
    own_postgres.start()
    return own_postgres.database(new_name())


@pytest.fixture
def proxied(make_world, postgres):
    """An application that reaches its database by way of a proxy."""
    with servers.FaultProxy(postgres.database(new_name())) as proxy:
        yield make_world(SQLALCHEMY_DATABASE_URI=proxy.url), proxy


@pytest.fixture
def expect(assert_replayed):
    """What is there after a fault, and what the retries see."""

    def wait_for_the_end_of_the_first(world):
        """A 409 is right as long as the server has not noticed that the first attempt is over."""

        def told():
            answer = world.post()
            return answer if answer.status_code != 409 else None

        return wait_until(told, "another answer than 409")

    def nothing_yet(world, *, records=1):
        assert world.count() == 0
        assert [record.state for record in world.records()] == ["in_progress"] * records
        world.assert_clean()

    def kept(world, first):
        again = world.post()
        assert_replayed(first, again)
        assert world.count() == 1
        assert [record.state for record in world.records()] == ["completed"]
        world.assert_clean()

    def retry_runs(world, runs, *, total=2):
        retry = wait_for_the_end_of_the_first(world)
        assert retry.status_code == 201, retry.text
        assert len(runs) == total
        kept(world, retry)

    def retry_replays(world, runs):
        retry = wait_for_the_end_of_the_first(world)
        assert retry.status_code == 201
        assert retry.headers["Idempotent-Replayed"] == "true"
        assert runs == [1]
        assert world.count() == 1
        world.assert_clean()

    return SimpleNamespace(
        nothing_yet=nothing_yet, kept=kept, retry_runs=retry_runs, retry_replays=retry_replays
    )
