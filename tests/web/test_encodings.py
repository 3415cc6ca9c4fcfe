"""A database whose encoding cannot hold every character: names alone are stored as text."""

from contextlib import closing

import psycopg2
import pytest
import sqlalchemy as sa

from flask_idempotency import ConfigurationError, IdempotencyError, current_operation, idempotent

WITHOUT_EUROS = [("LATIN1", "psycopg2"), ("LATIN1", "psycopg"), ("SQL_ASCII", "psycopg2")]
pytestmark = [
    pytest.mark.parametrize("store", ["postgres"], indirect=True),
    pytest.mark.parametrize(("encoded", "driver"), WITHOUT_EUROS, indirect=True),
]


@pytest.fixture(scope="module")
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


@pytest.fixture
def world(make_world, encoded):
    world = make_world(SQLALCHEMY_DATABASE_URI=encoded, TESTING=True)
    yield world
    world.sql("delete from idempotency_record")


def test_keys_and_scopes_are_hashed_so_they_may_be_any_text(world, add_view):
    add_view(world, key=lambda: "\ud800\0€", scope=lambda: "€\0\ud800")
    assert world.post().status_code == 201
    assert world.post().headers["Idempotent-Replayed"] == "true"


@pytest.mark.parametrize("atomic", [True, False])
def test_a_name_or_step_that_the_database_cannot_hold_is_refused_before_it_runs(world, atomic):
    calls, refused = [], "encoding of the database cannot hold the name '€'"

    def view():
        with pytest.raises(IdempotencyError, match="a step's name is '€'.*in the encoding"):
            current_operation.step("€", calls.append, 1, atomic=atomic)
        return current_operation.step("charge", lambda: "€"), 201

    for name, options in ("€", {"atomic": atomic}), ("pay", {"atomic": False}):
        protected = idempotent(name=name, **options)(view)
        world.app.add_url_rule(f"/{name}", f"{name}", protected, methods=["POST"])
    with pytest.raises(ConfigurationError, match=refused):
        world.post("/€")
    with world.app.app_context(), pytest.raises(ConfigurationError, match=refused):
        world.idempotency.run("key-1", calls.append, 1, scope="alice", name="€", atomic=atomic)
    assert world.records() == []
    assert world.post("/pay").text == world.post("/pay").text == "€"
    assert calls == []
