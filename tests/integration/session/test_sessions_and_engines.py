"""Sessions and engines of the application's own: what is joined, left alone, given back, or refused."""

import contextlib
import re

import pytest
import sqlalchemy as sa
from flask import current_app
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session
from sqlalchemy import orm
from sqlalchemy.sql.dml import UpdateBase

from flask_idempotency import ConfigurationError, NotAtomic, RequestInProgress
from flask_idempotency.session.leftovers import undo
from tests import sessions
from tests.differential.harness import EQUAL, Either, Family, NothingKept, Refused
from tests.differential.schemas import TENANT, role_per_tenant, schema_per_tenant
from tests.integration.session.cases import (
    SOUND_OR_FAILED,
    SOUND_OR_REFUSED,
    commits,
    fails,
    pays,
    reads,
    rolls_back,
    sends,
    then,
    writes,
)
from tests.integration.views import pay_once, protect
from tests.sessions import present_session
from tests.stores import BOTH

family = Family(events=False)


def insert(world):
    return sa.insert(world.Audit.__table__).values(text="audited")


def audits(find, session=lambda world: world.session):
    """A row by a session that is given a bind."""
    return lambda world: (
        session(world).execute(
            insert(world), bind_arguments={"bind": bind} if (bind := find(world)) else {}
        )
        and None
    )


def autocommit_at_connect(world):
    """The driver's connections commit each statement, which SQLAlchemy does not know."""
    sa.event.listen(world.engine, "connect", lambda driver, _: setattr(driver, "autocommit", True))
    world.engine.dispose()


def role_at_connect(world):
    """The engine's role is one that a listener chooses, and the only one that may write records."""
    role_per_tenant(world)
    if world.protected:
        world.admin_run(f"grant all on idempotency_record to {TENANT}")
        world.admin_run(
            "create function by_it() returns trigger language plpgsql as $$ begin if current_user"
            f" <> '{TENANT}' then raise 'by %', current_user; end if; return new; end $$"
        )
        world.admin_run(
            "create trigger by_it before insert or update on idempotency_record"
            " for each row execute function by_it()"
        )

    @sa.event.listens_for(world.engine, "connect")
    def choose(driver, _record):
        driver.cursor().execute(f"set role {TENANT}")
        driver.commit()

    world.engine.dispose()


ARRANGED = {
    "autocommit at connect": {"setup": autocommit_at_connect, "expect": SOUND_OR_REFUSED},
    "a role chosen at connect": {"setup": role_at_connect},
}
for what, options in ARRANGED.items():
    for before in (None, reads):
        family.add(f"{what}{', and a read' if before else ''}", pays, before=before, **options)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("(?i)autocommit", {"isolation_level": "autocommit"}),
        ("(?i)autocommit", {"execution_options": {"isolation_level": "autocommit"}}),
        ("StaticPool", {"poolclass": sa.StaticPool}),
    ],
    ids=["autocommit", "autocommit by an option", "one connection for all"],
)
def test_an_engine_that_cannot_do_it_is_refused_at_start(said, options, make_world):
    with pytest.raises(ConfigurationError, match=said):
        make_world(SQLALCHEMY_ENGINE_OPTIONS=options)


# The engine's map of schemas, and the role that a deferred trigger meets.


def translated(amount):
    """Into the schema that the map of the engine names."""
    table = sa.Table("payment", sa.MetaData(), sa.Column("amount", sa.Integer), schema="tenant")
    return lambda world: world.session.execute(sa.insert(table).values(amount=amount)) and None


def of_the_session(world):
    """Options of one transaction, over the engine's own; it ends with them."""
    world.session.connection(execution_options={"schema_translate_map": {"tenant": None}})


two = then(translated(1), commits, translated(2), commits)
for what, view, before in (
    ("of the engine", then(two, translated(3), rolls_back, translated(4), commits), reads),
    ("of the session over it, before the view", two, of_the_session),
):
    options = {"execution_options": {"schema_translate_map": {"tenant": "tenant_a"}}}
    family.add(f"a map {what}", view, before=before, engine_options=options, setup=schema_per_tenant)


def writes_who(world):
    """A deferred trigger notes who the role is then; a constraint is where that may not look."""
    role_per_tenant(world)
    world.admin_run("create schema hidden")
    world.admin_run("create table hidden.a (n int unique deferrable initially deferred)")
    world.admin_run(
        "create function who() returns trigger language plpgsql as"
        " $$ begin insert into audit (text) values (current_user); return null; end $$"
    )
    world.admin_run(
        "create constraint trigger who after insert on payment deferrable initially deferred"
        " for each row execute function who()"
    )


by_role = then(sends(f"set local role {TENANT}"), pays)
family.add("a deferred trigger that asks for the role", then(by_role, by_role), setup=writes_who)

family.add("what is prepared forgotten in the view", then(pays, sends("deallocate all"), pays))

# Binds that are given, and other connections.


@family(status=500, pool=2, expect=Either((EQUAL, Refused(besides=("audit",)))))
def an_audit_row_on_a_connection_that_was_given(world):
    """Its transaction ends at once, whatever becomes of the view."""
    with world.engine.begin() as connection:
        audits(lambda _: connection)(world)
        world.session.commit()
    then(writes, fails)(world)


def strict_engine(world):
    return world.engine.execution_options(isolation_level="SERIALIZABLE")


def by_the_engine(world):
    own_by_name = world.session.connection(bind_arguments={"bind": world.engine})
    own_by_name.execute(insert(world))


for what, audit in {
    "the engine": audits(lambda world: world.engine),
    "the session's own connection": audits(lambda world: world.session.connection()),
    "the session's connection by the engine": by_the_engine,
}.items():
    family.add(f"{what} given as a bind", then(audit, rolls_back, audit, pays))


def on_the_sessions_connection(world):
    """A session that nobody ends, as SQLAlchemy-Continuum makes one for each transaction."""
    world.here["beside"] = beside = orm.Session(world.session.connection())
    beside.add(world.Audit(text="beside"))
    beside.flush()


for what, ends in ("is committed", pays), ("is rolled back", rolls_back):
    family.add(
        f"a session on the session's connection that nobody ends, which {what}",
        then(writes, on_the_sessions_connection, ends, on_the_sessions_connection, pays, pays),
    )


def caught_in_a_savepoint(world):
    """The savepoint of the connection has failed with what is in it, and SQLAlchemy forgets it."""
    connection = world.session.connection()
    failed = contextlib.suppress(sa.exc.DBAPIError)
    with failed, connection.begin_nested(), failed:
        world.sql("select 1/0")
    world.session.rollback()


family.add(
    "an error caught in a savepoint of the connection", then(writes, caught_in_a_savepoint, pays)
)


def another_session_begins(world):
    world.here["other"] = sessions.factory_of(world.app, world.db)()
    world.here["other"].execute(sa.text("select 1"))


def a_transaction_of_what_get_bind_returns(world):
    writes(world)
    with world.session.get_bind().begin() as connection:
        connection.execute(insert(world))


def asks_the_bind(world):
    bind = world.session.get_bind()
    world.note(f"{bind.name} {bind.driver} {bind.dialect.name} {bind.url.drivername}")


family.add("a bind that is asked what it is", then(asks_the_bind, pays, asks_the_bind))


def in_two_phases(world):
    present_session(world.db).twophase = True


OWN = Refused("the engine|connection of its own")
for what, view, options in (
    ("an engine that isolates otherwise", audits(strict_engine), {"expect": OWN}),
    (
        "another session that had begun before the view",
        audits(lambda _: None, lambda world: world.here["other"]),
        {
            "expect": OWN,
            "before": another_session_begins,
            "teardown": lambda world, _error: world.here["other"].close(),
        },
    ),
    (
        "a transaction of what get_bind returns",
        then(a_transaction_of_what_get_bind_returns, rolls_back),
        {"expect": SOUND_OR_FAILED},
    ),
    ("two phases", in_two_phases, {"status": None, "expect": NothingKept(500)}),
):
    family.add(what, then(view, pays), pool=2, **options)


@family.each()
def test_sessions_and_engines_are_as_without_us(hold, case):
    hold(case)


# Another database.


class Routing(Session):
    """As SQLAlchemy's documentation has it."""

    def get_bind(self, mapper=None, *, clause=None, **kwargs):
        if self._flushing or isinstance(clause, UpdateBase):
            return super().get_bind(mapper, clause=clause, **kwargs)
        return current_app.extensions["sqlalchemy"].engines["replica"]


def test_a_session_that_reads_from_a_replica_is_refused_with_the_cure(make_world, postgres):
    db = SQLAlchemy(session_options={"class_": Routing})
    world = make_world(db=db, SQLALCHEMY_BINDS={"replica": postgres.database("replica")})
    protect(world, lambda: pay_once(world) or [db.session.query(world.Payment).count()])
    world.app.testing = True
    with pytest.raises(NotAtomic, match=r"return what super\(\).get_bind\(\) returns"):
        world.post()
    assert world.count() == 0


def test_a_bind_that_is_not_there_is_named(view):
    world = view(dict, other_binds=["logs"])
    name = world.app.extensions["idempotency"].sessions.usual
    with pytest.raises(ConfigurationError, match=rf"'logs'.*\[{re.escape(repr(name))}\]"):
        world.post()


@BOTH
def test_a_lock_is_not_taken_for_another_ones(world):
    """What an earlier lock in the same transaction left says nothing: here are three jobs in one."""
    runs, session = [], sessions.proxy_of(world.db)

    def job(key):
        runs.append(key)
        session.add(world.Payment(amount=5, note=key))
        session.commit()
        if len(runs) == 2:
            raise OSError("as asked")

    @world.app.post("/jobs")
    def run():
        answers = []
        for key in ("done", "busy", "done"):
            session.execute(sa.text("select set_config('idempotency.held', 'true', true)"))
            try:
                world.idempotency.run(key, job, key, scope="s", name="job")
                answers.append(key)
            except (RequestInProgress, OSError) as error:
                answers.append(type(error).__name__)
        return answers

    assert world.client.post("/jobs").json == ["done", "OSError", "done"]
    with world.app.app_context(), world.db.engine.connect() as other:
        other.execute(sa.text("select 1 from idempotency_record for update"))
        assert world.client.post("/jobs").json == ["done", "RequestInProgress", "done"]
    assert world.sql("select note from payment") == [("done",)]
    assert world.client.post("/jobs").json == ["done", "busy", "done"]
    assert runs == ["done", "busy", "busy"]
    world.assert_clean()


def test_a_deletion_is_undone_with_its_children_where_nothing_may_be_added(world):
    db = world.db

    class Part(db.Model):
        id = sa.Column(sa.Integer, primary_key=True)
        of = sa.Column(sa.ForeignKey(world.Payment.id))

    world.Payment.parts = orm.relationship(Part, cascade="all, delete-orphan")
    with world.app.app_context():
        db.create_all()
        db.session.add(world.Payment(id=1, amount=1, parts=[Part(), Part()]))
        db.session.commit()
        with db.session.begin():
            db.session.delete(db.session.get(world.Payment, 1))
            undo(db.session())
        db.session.commit()
    assert (world.count(), world.count("part")) == (1, 2)
