"""Single cases: texts that end a transaction, handlers of 500, lost connections, roles left behind."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from flask import Flask, g
from sqlalchemy.orm import Session

from flask_idempotency import idempotent
from tests import sessions
from tests.differential.harness import (
    EQUAL,
    EQUAL_OR_REFUSED,
    ByDesign,
    Either,
    Family,
    NothingKept,
    Refused,
)
from tests.differential.schemas import TENANT, role_per_tenant, schema_per_tenant
from tests.differential.sentences import ROLLED_BACK
from tests.sessions import protect

family = Family()
ENDS = Refused("begins or ends|ended")


def sending(text):
    def view(world):
        world.pay(1)
        world.session.flush()
        world.session.connection().exec_driver_sql(text)
        world.pay(2)
        world.commit()

    return view


ENDINGS = {
    "COMMIT": "commit",
    "COMMIT behind a semicolon": "select 1; commit",
    "COMMIT AND CHAIN": "commit and chain",
    "ROLLBACK": "rollback",
    "BEGIN": "begin",
    "PREPARE TRANSACTION": "prepare transaction 'x'",
}
"""Behind what else they hide: ``tests/session/test_commits_that_are_not_ours.py``."""
for what, text in ENDINGS.items():
    family.add(
        f"{what}, sent as text",
        sending(text),
        status=None,
        expect=ENDS,
    )


def with_old_strings(text):
    """Strings in which a backslash escapes, as in old applications."""

    def view(world):
        world.sql("set local standard_conforming_strings = off")
        sending(text)(world)

    return view


family.add(
    "COMMIT behind a backslash in an old string",
    with_old_strings("select 'a\\''; commit; --'"),
    status=None,
    expect=ENDS,
)

HARMLESS = {
    "a savepoint of its own": "savepoint a; select 1; rollback to savepoint a; release savepoint a",
    "an anonymous block": "do $$ begin perform 1; end $$",
    "a case expression": "select case when true then 1 else 2 end",
    "a prepared statement": "prepare q as select 1; execute q; deallocate q",
}
for what, text in HARMLESS.items():
    family.add(f"{what}, sent as text", sending(text))
family.add(
    "the word in an old string",
    with_old_strings("select 'a\\'; commit; --'"),
    expect=EQUAL_OR_REFUSED,
)
family.add("a block that commits", sending("do $$ begin commit; end $$"), status=500)
family.add("VACUUM, sent as text", sending("vacuum audit"), status=500)


@family(expect=Refused("begins or ends a transaction"))
def a_function_with_an_atomic_body(world):
    world.sql(
        "create or replace function twice(a int) returns int language sql"
        " begin atomic select a * 2; end"
    )
    world.pay(world.sql("select twice(2)"))
    world.commit()
    world.sql("drop function twice(int)")
    world.commit()


@family(expect=Refused("begins or ends a transaction"))
def a_procedure_with_an_atomic_body(world):
    world.sql(
        "create or replace procedure note_it() language sql"
        " begin atomic insert into audit (text) values ('called'); end"
    )
    world.sql("call note_it()")
    world.sql("drop procedure note_it()")
    world.commit()


@family()
def a_value_that_looks_like_a_commit_behind_a_comment(world):
    world.sql("/* tag */ insert into audit (text) values (:text)", text="*/ commit")
    world.commit()


@family()
def tables_made_in_the_view(world):
    world.sql("create table made (a int)")
    world.sql("insert into made values (1)")
    world.commit()
    world.note(world.sql("select count(*) from made"))
    world.sql("drop table made")
    world.commit()


# Handlers of errors that nobody expected.


def shows_the_id_in_the_handler(world):
    """An apology with what the view had done."""

    @world.app.errorhandler(500)
    def answer(error):
        return {"id": g.payment.id}, 500


def reads_in_the_handler(world):
    @world.app.errorhandler(500)
    def answer(error):
        return {"amount": g.payment.amount, "note": g.payment.note}, 500


def reads_in_the_handler_of_all(world):
    @world.app.errorhandler(Exception)
    def answer(error):
        return {"amount": g.payment.amount}, 500


def writes_in_the_handler(world):
    @world.app.errorhandler(RuntimeError)
    def answer(error):
        world.session.rollback()
        world.audit("failed")
        world.commit()
        return {"error": "no"}, 500


def committed_and_failed(world):
    g.payment = world.pay(5, None)
    world.commit()
    raise RuntimeError("no")


for arranged in (shows_the_id_in_the_handler, reads_in_the_handler_of_all, writes_in_the_handler):
    what = arranged.__name__.replace("_", " ")
    family.add(
        f"an application that {what}",
        committed_and_failed,
        setup=arranged,
        status=500,
        expect=ByDesign(ROLLED_BACK, NothingKept().problems),
    )


@family(setup=reads_in_the_handler, status=500)
def a_handler_of_500_that_reads_what_was_there_before(world):
    g.payment = world.Payment(amount=7)
    account = world.session.query(world.Account).filter_by(name="alice").one()
    world.commit()
    g.payment.note = account.name
    raise RuntimeError("no")


def shows_the_id_after_a_503(world, response):
    if world.view_ran:
        world.note(g.payment.id)


@family(
    status=503,
    after_request=shows_the_id_after_a_503,
    expect=ByDesign(ROLLED_BACK, NothingKept().problems),
)
def an_after_request_function_that_shows_the_id_of_what_a_503_committed(world):
    g.payment = world.pay(5)
    world.commit()
    return {"error": "later"}, 503


# Connections that are thrown away.

LOST = Either((Refused(), NothingKept(503)))


@family(expect=LOST, status=None)
def session_invalidate(world):
    world.pay(1)
    world.session.flush()
    world.session().invalidate()
    world.pay(2)
    world.commit()


@family(expect=LOST, status=None)
def session_invalidate_at_the_end(world):
    world.pay(1)
    world.commit()
    world.session.query(world.Payment).first()
    world.session().invalidate()


@family(expect=LOST, status=None)
def connection_invalidate(world):
    world.pay(1)
    world.session.flush()
    world.session.connection().invalidate()
    world.session.rollback()
    world.pay(2)
    world.commit()


@family(expect=LOST, status=None)
def connection_invalidate_after_a_commit(world):
    world.pay(1)
    world.commit()
    world.session.connection().invalidate()
    world.session.rollback()


@family(expect=EQUAL_OR_REFUSED, status=None)
def connection_detach(world):
    world.pay(1)
    world.session.flush()
    world.session.connection().detach()
    world.commit()


@family(expect=EQUAL_OR_REFUSED, status=None)
def connection_close(world):
    world.pay(1)
    world.session.flush()
    world.session.connection().close()
    world.pay(2)
    world.commit()


@family(expect=EQUAL_OR_REFUSED)
def connection_close_after_a_commit(world):
    world.pay(1)
    world.commit()
    world.session.connection().close()


@family(expect=EQUAL_OR_REFUSED)
def connection_in_a_with_after_a_commit(world):
    world.pay(1)
    world.commit()
    with world.session.connection():
        pass


@family(expect=Either((EQUAL, Refused(), NothingKept(500))), status=None)
def connection_commit(world):
    world.session.connection().execute(sa.text("insert into payment (amount) values (1)"))
    world.session.connection().commit()
    world.pay(2)
    world.commit()


@family(expect=EQUAL_OR_REFUSED, status=None)
def connection_rollback(world):
    world.session.connection().execute(sa.text("insert into payment (amount) values (1)"))
    world.session.connection().rollback()
    world.pay(2)
    world.commit()


@family()
def connection_begin_nested(world):
    connection = world.session.connection()
    with connection.begin_nested():
        connection.execute(sa.text("insert into payment (amount) values (1)"))
    nested = connection.begin_nested()
    connection.execute(sa.text("insert into payment (amount) values (2)"))
    nested.rollback()
    world.commit()


@family(expect=EQUAL_OR_REFUSED, status=500)
def connection_begin(world):
    connection = world.session.connection()
    with connection.begin():
        connection.execute(sa.text("insert into payment (amount) values (1)"))


# What an earlier request left on the pooled connection.


@dataclass(frozen=True)
class NamesTheRole:
    """Refused, by an error that says which role it was, with nothing committed."""

    def problems(self, outcome):
        found = NothingKept(500).problems(outcome)
        errors = outcome.protected.steps[0].reply.errors
        if not any(TENANT in error.message for error in errors):
            found.append(f"errors do not name the role: {errors}")
        return found


def leaves(statement):
    """An unprotected request before the first one."""

    def prelude(world):
        def view(world):
            world.sql(statement)
            world.commit()

        assert world.request(view).status_code == 201

    return prelude


def pay(world):
    world.pay(1)
    world.commit()


def pay_and_show(world):
    world.pay(1)
    world.note(world.sql("select current_user || ' ' || current_setting('search_path')"))
    world.commit()


family.add(
    "a role that an earlier request left",
    pay_and_show,
    setup=role_per_tenant,
    prelude=leaves(f"set role {TENANT}"),
    expect=Either((EQUAL, NamesTheRole())),
)
family.add(
    "a search path that an earlier request left",
    pay_and_show,
    setup=schema_per_tenant,
    prelude=leaves("set search_path = tenant_a"),
)
family.add(
    "a time-out that an earlier request left", pay, prelude=leaves("set statement_timeout = '5s'")
)
family.add(
    "a temporary table that an earlier request left",
    pay,
    prelude=leaves("create temporary table idempotency_record (key bytea)"),
)


# Sessions and applications of other kinds.


def everything(world):
    payment = world.pay(1)
    world.commit()
    world.note(payment.amount)
    nested = world.session.begin_nested()
    world.pay(2)
    world.session.flush()
    nested.rollback()
    world.note(world.session.query(world.Account).count())
    world.pay(3)
    world.session.flush()
    world.session.rollback()
    world.pay(4)
    world.commit()


for what, options in {
    "a session that keeps its objects": {"expire_on_commit": False},
    "a session that does not flush by itself": {"autoflush": False},
}.items():
    family.add(what, everything, session_options=options)


@family(session_options={"autobegin": False})
def a_session_that_does_not_begin_by_itself(world):
    with world.session.begin():
        world.pay(1)
    with world.session.begin():
        world.note(world.session.query(world.Account).count())


@family(
    session_options={"twophase": True},
    status=None,
    expect=NothingKept(500),
)
def a_session_of_two_phases(world):
    world.pay(1)
    world.commit()


def second_application(world):
    """Another Flask application with the same ``SQLAlchemy`` object, on the same database."""
    app = Flask("second")
    app.config.update(world.app.config)
    world.db.init_app(app)
    view = paying_in_the_second(world)
    if world.protected:
        protect(app, world.db, scope=None)
        view = idempotent(view)
    app.add_url_rule("/payments", "pay_second", view, methods=["POST"])
    world.second = app


def paying_in_the_second(world):
    def view():
        world.db.session.add(world.Payment(amount=50))
        world.db.session.commit()
        return {"ok": True}, 201

    return view


def ask_second(world, key):
    headers = {"Idempotency-Key": key}
    return world.second.test_client().post("/payments", headers=headers).status_code


@family(setup=second_application)
def a_second_application_on_the_same_object(world):
    everything(world)


def second_first(world):
    world.second_answers = [ask_second(world, "second")]
    with world.second.app_context():
        world.db.engine.dispose()


@family(setup=second_application, prelude=second_first)
def a_second_application_that_was_asked_before(world):
    world.note(world.second_answers)
    everything(world)


# A plain session is the thread's, so this would be a request to the view's own application.
@family(setup=second_application, stores=() if sessions.usual == "plain" else ("postgres",))
def a_second_application_that_is_asked_by_the_view(world):
    world.pay(1)
    world.commit()
    world.here["number"] = world.here.get("number", 0) + 1
    world.note(ask_second(world, f"inside-{world.here['number']}"))
    world.pay(2)
    world.commit()


@family(setup=second_application, expect=EQUAL_OR_REFUSED)
def a_second_application_whose_session_the_view_uses(world):
    world.pay(1)
    world.session.flush()
    with world.second.app_context():
        world.session.add(world.Audit(text="second"))
        world.session.commit()
    world.commit()


@family(pool=2)
def a_session_of_plain_sqlalchemy(world):
    with Session(world.engine) as session:
        session.add(world.Audit(text="own"))
        session.commit()
    world.pay(1)
    world.commit()


@family.in_every_store()
def test_a_small_thing_is_as_without_us_or_refused(hold, case, store):
    hold(case, store)
