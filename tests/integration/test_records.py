"""Records on PostgreSQL, beyond the contract: connections, forgotten holds, waiting for locks."""

import gc
import time
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest

import servers
from flask_idempotency import current_operation
from flask_idempotency.core.records import StoredResponse
from servers import plain_dsn
from tests.contract.claims import a_claim, again, stored_record


@pytest.fixture
def records(world):
    """The store itself; the table lives on the usual application's database."""
    return world.app.extensions["idempotency"].records


def test_any_text_of_a_record_is_read_as_it_was_written(records):
    for name in "NULL", "", '"{a,\\\\b}"', "Zürich \u2028":
        claim = replace(a_claim(), name=name)
        response = StoredResponse(201, (("X-Odd", name),), name.encode())
        records.claim(claim).complete(response)
        found = records.look(claim.key)
        assert (found.name, found.response) == (name, response)


CLAIM = b"DO NOTHING"
"""In each claim's message, and in no other."""


@pytest.mark.parametrize("arrives", [True, False])
def test_a_claim_whose_connection_breaks_is_ours(make_world, postgres, add_view, background, arrives):
    with servers.FaultProxy(postgres.database(f"claims_{arrives}")) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
        runs = add_view(world)
        world.post(key="opens-a-connection")
        if arrives:
            proxy.lose_answer(CLAIM)
        else:
            proxy.hold(CLAIM)
        first = background(world.post)
        if not arrives:
            proxy.wait_until_held()
            proxy.cut()
        assert first.result().status_code == 201
        assert proxy.lost == arrives
        assert runs == [1, 1], "the attempt is the first one"


def test_a_hold_that_is_forgotten_frees_its_row_and_leaves_no_transaction_in_the_pool(records):
    claim = a_claim()
    hold = records.claim(claim)
    del hold
    gc.collect()
    with records.messages.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert not driver.autocommit
        assert driver.info.transaction_status == 0
    hold = records.take_over(again(claim), stored_record(records, claim))
    assert hold.attempt == 2
    hold.abandon()


IMPATIENT = {"connect_args": {"options": "-c statement_timeout=3000"}}


@pytest.mark.parametrize("during", ["the claim", "a replay", "a step"])
def test_a_locked_table_is_waited_for_briefly(make_world, add_view, during):
    world = make_world(SQLALCHEMY_ENGINE_OPTIONS=IMPATIENT)
    url = world.app.config["SQLALCHEMY_DATABASE_URI"]
    with closing(psycopg2.connect(plain_dsn(url))) as migration:

        def lock():
            migration.cursor().execute("lock table idempotency_record in access exclusive mode")

        def step():
            if during == "a step" and runs == [1, 1]:
                lock()
                current_operation.step("pay", lambda: None, atomic=True)

        runs = add_view(world, atomic=during != "a step", during=step)
        world.post(key="key-1" if during == "a replay" else "key-0")
        if during != "a step":
            lock()
        started = time.monotonic()
        assert world.post().status_code == 503
        assert time.monotonic() - started < 2
