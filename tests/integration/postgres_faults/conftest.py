"""A server that a test may stop, a way to the database that breaks, and what retries find then."""

import pytest

import servers
from tests.waiting import wait_until


def first_time(fault):
    """The fault happens in the first attempt only."""
    left = [fault]
    return lambda: left.pop()() if left else None


def settings(**values):
    """Engine options that set Postgres's settings for each connection."""
    options = " ".join(f"-c {name}={value}" for name, value in values.items())
    return {"SQLALCHEMY_ENGINE_OPTIONS": {"connect_args": {"options": options}}}


@pytest.fixture(scope="module")
def own_postgres():
    """A server that a test may stop; it runs again at the beginning of the next."""
    with servers.Postgres(fsync=False) as server:
        yield server


@pytest.fixture
def own_database(own_postgres):
    own_postgres.start()
    return own_postgres.database("faulty")


@pytest.fixture
def proxied(make_world, postgres):
    """An application that reaches its database by way of a proxy."""
    with servers.FaultProxy(postgres.database("proxied")) as proxy:
        yield make_world(SQLALCHEMY_DATABASE_URI=proxy.url), proxy


@pytest.fixture
def retries(assert_problem, assert_replayed):
    """What is told after a fault, how often the view has run by the end, and what is there."""

    def check(world, runs, first, *, total=2, committed=False):
        assert_problem(first, 503, "store-unavailable", retry=True)
        if not committed:
            assert world.count() == 0
            assert {record.state for record in world.records()} <= {"in_progress"}

        def answer():
            """A 409 is right as long as the server has not noticed that the first attempt is over."""
            response = world.post()
            return response if response.status_code != 409 else None

        retry = wait_until(answer, "another answer than 409")
        assert retry.status_code == 201, retry.text
        assert ("Idempotent-Replayed" in retry.headers) is committed
        assert len(runs) == total
        if not committed:
            assert_replayed(retry, world.post())
        assert world.count() == 1
        assert [record.state for record in world.records()] == ["completed"]
        world.assert_clean()

    return check
