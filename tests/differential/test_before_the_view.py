"""What an application does with its session before the view reaches it.

Most of it, and what is refused: ``tests/session/test_before_the_view.py``.
"""

from __future__ import annotations

import sqlalchemy as sa
from flask import g

from tests.differential.harness import EQUAL_OR_REFUSED, Family, Refused
from tests.differential.schemas import (
    TENANT,
    role_per_tenant,
    row_level_security,
    schema_per_tenant,
)
from tests.drivers import EACH

family = Family()
REFUSED = Refused("before")

SHOWN = (
    "app.tenant",
    "role",
    "search_path",
    "lock_timeout",
    "statement_timeout",
    "timezone",
    "synchronous_commit",
    "transaction_isolation",
    "transaction_read_only",
    "transaction_deferrable",
)


def show_and_pay(world):
    world.show(*SHOWN)
    world.pay(1)
    world.commit()
    world.show(*SHOWN)


def pay(world):
    world.pay(1)
    world.commit()


def sends(statement):
    """Something that is executed before the view, and not committed."""
    return lambda world: world.sql(statement)


def sign_in(world):
    """The usual way to row-level security."""
    world.sql("select set_config('app.tenant', 'b', true)")
    world.sql(f"set local role {TENANT}")


family.add(
    "the tenant of row level security",
    pay,
    before=sign_in,
    setup=row_level_security,
)


def tenant_at_checkout(world):
    """A listener of the pool, which begins the driver's transaction."""

    @sa.event.listens_for(world.engine, "checkout")
    def choose(driver, _record, _proxy):
        with driver.cursor() as cursor:
            cursor.execute("select set_config('app.tenant', 'a', true)")


def tenant_for_the_session_at_checkout(world):
    @sa.event.listens_for(world.engine, "checkout")
    def choose(driver, _record, _proxy):
        with driver.cursor() as cursor:
            cursor.execute("set app.tenant = 'a'")


def role_at_begin(world):
    role_per_tenant(world)

    @sa.event.listens_for(world.engine, "begin")
    def choose(connection):
        connection.exec_driver_sql(f"set local role {TENANT}")


def show_first(world):
    """What a checkout listener set holds in the first transaction of a connection."""
    world.note(world.sql("select current_setting('app.tenant', true)"))
    world.pay(1)
    world.commit()


for arranged in (tenant_at_checkout, tenant_for_the_session_at_checkout):
    what = arranged.__name__.replace("_", " ")
    family.add(f"{what}", show_first, setup=arranged)
    family.add(f"{what}, and a read before", show_first, setup=arranged, before=sends("select 1"))
family.add("a role chosen by a listener of the engine", show_and_pay, setup=role_at_begin)
family.add(
    "a role chosen by a listener of the engine, and a read before",
    show_and_pay,
    setup=role_at_begin,
    before=sends("select 1"),
)


# What SQLAlchemy keeps for the transaction.


def translate(world):
    options = {"schema_translate_map": {None: "tenant_a"}}
    world.session.connection(execution_options=options)


def pay_in_two_transactions(world):
    world.pay(1)
    world.commit()
    world.pay(2)
    world.commit()


family.add("a schema translate map", pay_in_two_transactions, before=translate, setup=schema_per_tenant)


def keep_connection(world):
    g.connection = world.session.connection()


@family(before=keep_connection)
def a_connection_of_the_session_kept_for_the_view(world):
    world.pay(1)
    world.session.flush()
    world.note(g.connection.scalar(sa.text("select count(*) from payment")) >= 1)
    g.connection.execute(sa.insert(world.Audit).values(text="kept"))
    world.commit()


def keep_result(world):
    g.rows = world.session.execute(sa.text("select name from account order by 1"))


@family(before=keep_result)
def a_result_kept_for_the_view(world):
    world.note([row.name for row in g.rows])
    pay(world)


def keep_objects(world):
    g.user = world.session.query(world.Account).filter_by(name="alice").one()


@family(before=keep_objects)
def objects_read_before_the_view(world):
    g.user.balance -= 10
    world.pay(10)
    world.commit()
    return {"balance": g.user.balance}, 201


@family(before=keep_objects)
def objects_read_before_the_view_and_rolled_back_in_it(world):
    g.user.balance -= 10
    world.session.flush()
    world.session.rollback()
    world.note(g.user.balance)
    pay(world)


@family(before=keep_objects)
def objects_read_before_the_view_and_detached_in_it(world):
    world.session.expunge(g.user)
    world.note(g.user.balance)
    pay(world)


def change_object(world):
    g.user = world.session.query(world.Account).filter_by(name="alice").one()
    g.user.balance -= 10


@family(before=change_object)
def changes_not_flushed_before_the_view(world):
    pay(world)


@family(before=change_object, status=409)
def changes_not_flushed_before_the_view_and_rolled_back_in_it(world):
    world.session.rollback()
    return {"balance": g.user.balance}, 409


@family(before=lambda world: world.session.begin())
def a_transaction_begun_before_the_view(world):
    pay(world)


@family(before=lambda world: world.session.connection())
def a_connection_taken_before_the_view(world):
    pay(world)


def audit_before(world):
    world.audit("before")
    world.commit()


family.add("a commit before the view", pay, before=audit_before)


def fail_before(world):
    with world.catching():
        world.sql("select 1 / 0")


def fail_in_flush_before(world):
    with world.catching():
        world.session.add(world.Payment(amount=None))
        world.session.flush()


def fail_and_roll_back_before(world):
    fail_before(world)
    world.session.rollback()


family.add("an error before the view, rolled back", pay, before=fail_and_roll_back_before)
family.add(
    "an error before the view, not rolled back",
    pay,
    before=fail_before,
    status=500,
    expect=EQUAL_OR_REFUSED,
)
family.add(
    "a failed flush before the view, not rolled back",
    pay,
    before=fail_in_flush_before,
    status=500,
    expect=EQUAL_OR_REFUSED,
)


def prepare(world):
    world.sql("deallocate all")
    world.sql("prepare pay as insert into payment (amount) values ($1)")


@family(before=prepare)
def a_statement_prepared_before_the_view(world):
    world.sql("execute pay (3)")
    world.commit()


# What else is left to the view.


def writes(world):
    world.audit("before")
    world.session.flush()


def locks_a_row(world):
    world.session.query(world.Account).filter_by(name="alice").with_for_update().one()


for what, before in {
    "a weak table lock": sends("lock table audit in access share mode"),
    "a channel listened to": sends("listen paid"),
    "an exported snapshot": sends("select pg_export_snapshot()"),
    "deferrable by a statement": sends("set transaction deferrable"),
}.items():
    family.add(f"{what}, not committed", pay, before=before)


def advisory_for_the_session(world):
    world.sql("select pg_advisory_lock(8)")


@family(before=advisory_for_the_session)
def an_advisory_lock_of_the_session_not_committed(world):
    """It outlives every transaction, but not the connection: the view must run on this one."""
    pay(world)
    world.sql("select pg_advisory_unlock(8)")
    world.commit()


def committed_advisory_lock(world):
    advisory_for_the_session(world)
    world.commit()


@family(before=committed_advisory_lock, expect=EQUAL_OR_REFUSED)
def an_advisory_lock_of_the_session_committed(world):
    pay(world)
    world.note(world.sql("select pg_advisory_unlock(8)"))
    world.commit()


# Snapshots.


def read_balance(world):
    g.balance = world.session.query(world.Account).filter_by(name="alice").one().balance


def debit(world):
    """What was read before the view decides."""
    account = world.session.query(world.Account).filter_by(name="alice").one()
    account.balance = g.balance - 10
    pay(world)


for level in ("REPEATABLE READ", "SERIALIZABLE"):
    options = {"isolation_level": level}
    family.add(
        f"a read before the view at {level}",
        debit,
        before=read_balance,
        engine_options=options,
        expect=REFUSED,
    )
    family.add(f"no read before the view at {level}", show_and_pay, engine_options=options)
    family.add(
        f"a read before the view at {level} that was rolled back",
        pay,
        engine_options=options,
        before=lambda world: read_balance(world) or world.session.rollback(),
    )
family.add("a read before the view at READ COMMITTED", debit, before=read_balance)


def another_debits_meanwhile(world):
    """Between the read before the view and the view, as another request would."""
    read_balance(world)
    world.admin_run("update account set balance = 40 where name = 'alice'")


@family(
    before=another_debits_meanwhile,
    engine_options={"isolation_level": "REPEATABLE READ"},
    status=None,
    expect=Refused("before", besides=("account",)),
)
def two_debits_of_60_from_100(world):
    account = world.session.query(world.Account).filter_by(name="alice").one()
    account.balance = g.balance - 60
    pay(world)


# Connections of one's own, taken before the view.


def connection_of_the_engine(world):
    g.own = world.engine.connect()
    g.seen = g.own.scalar(sa.text("select count(*) from account"))


def close_own(world, response):
    g.own.close()


@family(before=connection_of_the_engine, pool=2, after_request=close_own)
def a_connection_of_the_engine_kept_for_the_view(world):
    world.pay(g.seen)
    world.commit()
    world.note(g.own.scalar(sa.text("select 1")))


def raw_lock(world):
    """A lock on a connection that is not the session's is nobody else's business."""
    g.own = world.engine.connect()
    g.own.execute(sa.text("select pg_advisory_xact_lock(9)"))


family.add(
    "an advisory lock on a connection of its own", pay, before=raw_lock, pool=2, after_request=close_own
)


def early_read(world):
    @world.app.before_request
    def read():
        world.note(world.session.query(world.Account).count())


family.add("a read in a function registered before the extension", pay, early=early_read)


def above_reads(world, call):
    world.note(world.session.query(world.Account).count())
    return call()


family.add("a read in a decorator above", show_and_pay, above=above_reads)


# Transactions that a before_request function begins, for somebody to end after the view.


def begins(world):
    """Authentication reads, inside a transaction of its own."""
    g.transaction = world.session.begin()
    world.note(world.session.query(world.Account).count())


def begins_and_sends_nothing(world):
    g.transaction = world.session.begin()


def begins_and_sets(world):
    begins(world)
    world.sql("set local app.tenant = 'a'")


def ends_it(world, response):
    g.transaction.commit()


def reads_and_ends_it(world, response):
    world.note(world.session.query(world.Payment).count())
    world.show("app.tenant")
    g.transaction.commit()


def rolls_it_back(world, response):
    g.transaction.rollback()


def keeps_its_connection(world):
    g.connection = world.session.connection()
    world.note(g.connection.scalar(sa.text("select count(*) from account")))


def reads_by_its_connection(world, response):
    world.note(g.connection.scalar(sa.text("select count(*) from account")))


def pay_without_commit(world):
    world.pay(5)


for begin in (begins, begins_and_sends_nothing, begins_and_sets):
    for end in (ends_it, reads_and_ends_it):
        what = f"a before_request that {begin.__name__}, an after_request that {end.__name__}"
        family.add(what.replace("_", " "), pay_without_commit, before=begin, after_request=end)
family.add(
    "a transaction before the view, rolled back after a rejection",
    lambda world: ({"error": "no"}, 409),
    before=begins,
    after_request=rolls_it_back,
    status=409,
)


@EACH
@family.in_every_store()
def test_what_came_before_the_view_reaches_it_or_is_refused(hold, case, store):
    hold(case, store)


leased = Family(atomic=False)
for begin in (begins, begins_and_sends_nothing, begins_and_sets):
    what = f"a before_request that {begin.__name__}, an after_request that commits"
    leased.add(
        what.replace("_", " "), pay_without_commit, before=begin, after_request=reads_and_ends_it
    )
leased.add(
    "a connection kept before the view, read after it",
    lambda world: None,
    before=keeps_its_connection,
    after_request=reads_by_its_connection,
)
for statement in (
    "set local app.tenant = 'a'",
    "set app.tenant = 'a'",
    "set local lock_timeout = '9s'",
):
    leased.add(f"{statement}, not committed", show_and_pay, before=sends(statement))
for what, before in {
    "an insert flushed": writes,
    "a row lock": locks_a_row,
    "an advisory lock": sends("select pg_advisory_xact_lock(7)"),
}.items():
    leased.add(f"{what}, not committed", pay, before=before, pool=2)


@leased.in_every_store()
def test_what_came_before_a_view_that_is_not_atomic_reaches_it(hold, case, store):
    hold(case, store)
