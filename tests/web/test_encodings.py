"""A database whose encoding cannot hold every character: names alone are stored as text."""

from contextlib import closing

import psycopg2
import pytest
import sqlalchemy as sa

from flask_idempotency import ConfigurationError, IdempotencyError, current_operation, idempotent

ENCODINGS = ("LATIN1", "SQL_ASCII")
DRIVERS = ("psycopg2", "psycopg")

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)


@pytest.fixture(scope="module", params=ENCODINGS)
def encoded(request, postgres):
    """The URL of a database of such an encoding."""
    url = postgres.database(f"encoded_{request.param.lower()}")
    name = sa.make_url(url).database
    with closing(psycopg2.connect(postgres.dsn)) as connection:
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(f'drop database "{name}"')
        cursor.execute(
            f"create database \"{name}\" encoding '{request.param}' template template0"
            " lc_collate 'C' lc_ctype 'C'"
        )
    return url


@pytest.fixture(params=DRIVERS)
def world(request, make_world, encoded):
    url = sa.make_url(encoded).set(drivername=f"postgresql+{request.param}")
    world = make_world(SQLALCHEMY_DATABASE_URI=url.render_as_string(hide_password=False), TESTING=True)
    yield world
    world.sql("delete from idempotency_record")


def test_keys_and_scopes_are_hashed_so_they_may_be_any_text(world, add_view):
    add_view(world, key=lambda: "\ud800\0€", scope=lambda: "€\0\ud800")
    assert world.post().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("atomic", [True, False])
def test_a_name_that_the_database_cannot_hold_is_refused_before_the_view(world, add_view, atomic):
    runs = add_view(world, name="€", atomic=atomic)
    with pytest.raises(ConfigurationError, match="encoding of the database cannot hold the name '€'"):
        world.post()
    assert (runs, world.records()) == ([], [])


def test_run_refuses_it_too(world):
    calls = []
    with world.app.app_context(), pytest.raises(ConfigurationError, match="cannot hold the name '€'"):
        world.idempotency.run("key-1", lambda: calls.append(1), scope="alice", name="€")
    assert calls == []


@pytest.mark.parametrize("atomic", [True, False])
def test_a_step_that_it_cannot_hold_is_not_called(world, atomic):
    charges = []

    def view():
        with pytest.raises(IdempotencyError, match="a step's name is '€'.*in the encoding"):
            current_operation.step("€", charges.append, 1, atomic=atomic)
        return current_operation.step("charge", lambda: "€"), 201

    world.app.add_url_rule("/payments", "pay", idempotent(atomic=False)(view), methods=["POST"])
    assert world.post().text == world.post().text == "€"
    assert charges == []
