"""Two sessions in one view, and requests that a view makes to its own application.

Each work beside each kind of session: ``tests.differential.tables``.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tests import sessions
from tests.differential.harness import EQUAL, EQUAL_OR_REFUSED, Either, Family, NothingKept, Refused

family = Family(pool=2)
REFUSED = Refused("session|request to its own application")


# What the first session does, and has not committed, when the second one begins.


def orm_insert(world):
    world.pay(1)
    world.session.flush()


def core_insert(world):
    world.session.execute(sa.insert(world.Payment.__table__).values(amount=1))


def lock_a_row(world):
    world.session.query(world.Account).filter_by(name="alice").with_for_update().one()


def release_a_nested_transaction(world):
    with world.session.begin_nested():
        world.pay(1)


# What the second session does.


def helper_that_reads(world):
    with world.app.app_context():
        world.note(world.session.query(world.Audit).count())


def helper_that_writes(world):
    with world.app.app_context():
        world.audit("helper")
        world.commit()


@dataclass
class Then:
    """First one, then the other, then a commit of the first."""

    work: object
    second: object
    finish: bool = False

    def __call__(self, world):
        self.work(world)
        if self.finish:
            world.commit()
        self.second(world)
        world.note(world.session.query(world.Payment).count())
        world.pay(9)
        world.commit()


def read(world):
    world.note([account.name for account in world.session.query(world.Account).order_by("name")])


def name(function):
    return function.__name__.replace("_", " ")


# A plain session is the thread's, in whatever context: a helper's is no second one.
BESIDE = EQUAL_OR_REFUSED if sessions.usual == "plain" else REFUSED
ENDED = Either((EQUAL, NothingKept(500))) if sessions.usual == "plain" else EQUAL
"""Where a helper's context, at its end, has removed the view's session."""
for work in (orm_insert, core_insert, lock_a_row):  # with the lock in Redis: see also the programs
    family.add(
        f"{name(work)}, then a helper reads",
        Then(work, helper_that_reads),
        expect=BESIDE,
        stores=("hybrid",),
    )


@family(expect=EQUAL_OR_REFUSED)
def an_object_that_is_not_flushed_yet_then_a_helper_reads(world):
    world.pay(1)
    helper_that_reads(world)
    world.commit()


@family(expect=BESIDE)
def work_in_the_helper_while_the_first_session_reads(world):
    first = world.session()
    with world.app.app_context():
        core_insert(world)
        world.note(first.query(world.Audit).count())
        world.commit()


@family(status=500 if sessions.usual == "plain" else 201, expect=ENDED)
def objects_of_the_first_session_are_read_after_the_second(world):
    account = world.session.query(world.Account).filter_by(name="alice").one()
    helper_that_writes(world)
    world.session.refresh(account)
    account.balance -= 1
    world.commit()
    return {"balance": account.balance}, 201


@family()
def the_first_session_sees_what_the_second_committed(world):
    read(world)
    with world.app.app_context():
        world.session.query(world.Account).filter_by(name="alice").one().balance = 3
        world.commit()
    world.session.expire_all()
    account = world.session.query(world.Account).filter_by(name="alice").one()
    world.note(account.balance)
    account.balance += 1
    world.commit()


@family()
def the_first_session_rolls_back_after_the_second_committed(world):
    """What the second has committed is none of what the first undoes."""
    read(world)
    helper_that_writes(world)
    core_insert(world)
    world.session.rollback()
    world.note(world.session.query(world.Audit).count())
    world.pay(2)
    world.commit()


family.add(
    "the first session, that was used before the view, rolls back after the second committed",
    the_first_session_rolls_back_after_the_second_committed,
    before=lambda world: world.sql("select count(*) from account"),
)


@family()
def the_first_session_keeps_a_savepoint_that_the_second_committed_in(world):
    with world.session.begin_nested():
        read(world)
        helper_that_writes(world)
        core_insert(world)
    world.commit()


@family(expect=EQUAL_OR_REFUSED)
def the_first_session_commits_while_the_second_is_at_work(world):
    """Its commit is none of what the second one does, and undoes."""
    first = world.session()
    read(world)
    with world.app.app_context():
        world.audit("undone")
        world.session.flush()
        first.commit()
        world.session.rollback()
    world.pay(2)
    world.commit()


@family(expect=EQUAL_OR_REFUSED)
def the_first_session_rolls_back_while_the_second_is_at_work(world):
    """Its rollback undoes none of what the second one commits."""
    first = world.session()
    read(world)
    with world.app.app_context():
        world.audit("helper")
        world.session.flush()
        first.rollback()
        world.commit()
    world.pay(2)
    world.commit()


@family(expect=BESIDE)
def two_sessions_that_read_in_turns(world):
    first = world.session()
    read(world)
    with world.app.app_context():
        read(world)
        world.note(first.query(world.Audit).count())
    world.commit()


@family(expect=BESIDE)
def a_helper_beside_a_statement_that_failed(world):
    first = world.session()
    with world.catching():
        world.sql("select 1 / 0")
    helper_that_writes(world)
    first.rollback()
    world.pay(1)
    world.commit()


@family(status=500, expect=EQUAL_OR_REFUSED)
def a_helper_that_fails(world):
    with world.app.app_context():
        world.audit("helper")
        world.session.flush()
        raise RuntimeError("no")


# Connections of one's own: the view has decided for them.


@family()
def a_session_of_its_own_on_the_engine(world):
    world.pay(1)
    world.session.flush()
    with Session(world.engine) as session:
        world.note(session.query(world.Payment).count())
    world.commit()


@family(expect=EQUAL_OR_REFUSED)
def a_session_on_an_engine_with_other_options_after_uncommitted_work(world):
    core_insert(world)
    engine = world.engine.execution_options(schema_translate_map={None: "public"})
    with Session(engine) as session:
        world.note(session.query(world.Payment).count())
    world.commit()


@family()
def a_session_on_an_engine_with_other_options_after_a_read(world):
    read(world)
    engine = world.engine.execution_options(schema_translate_map={None: "public"})
    with Session(engine) as session:
        world.note(session.query(world.Payment).count())
    world.pay(1)
    world.commit()


@family()
def a_connection_of_the_engine_that_writes(world):
    world.pay(1)
    with world.engine.begin() as connection:
        connection.execute(sa.insert(world.Audit).values(text="log"))
    world.commit()


@family.in_every_store()
def test_a_second_session_costs_the_first_nothing_or_is_refused(hold, case, store):
    hold(case, store)


inner = Family(pool=2)


def reading(world):
    return {"count": world.session.query(world.Payment).count()}, 200


def writing(world):
    world.audit("inner")
    world.commit()


def rolling_back(world):
    world.session.rollback()


def failing(world):
    raise RuntimeError("inner")


@dataclass
class Ask:
    """Work, then a request to the application itself; what it answers is passed on."""

    work: object
    function: object
    protected: bool = False
    finish: bool = False

    def __call__(self, world):
        self.work(world)
        if self.finish:
            world.commit()
        answer = world.request(self.function, protected=self.protected)
        world.note(answer.status_code)
        if self.protected and answer.status_code >= 500:
            return {}, 500
        world.pay(9)
        world.commit()
        return {"inner": answer.get_data(as_text=True)}, 201


def nothing(world):
    pass


for work in (read, core_insert):
    for function in (reading, writing, rolling_back):
        inner.add(
            f"{name(work)}, then an unprotected request that is {name(function)}", Ask(work, function)
        )
inner.add("core insert, then an unprotected request that fails", Ask(core_insert, failing))
inner.add(
    "core insert and a commit, then an unprotected request", Ask(core_insert, writing, finish=True)
)
for work in (nothing, read):
    for function in (reading, writing):
        view = Ask(work, function, protected=True)
        what = f"{name(work)}, then a protected request that is {name(function)}"
        inner.add(what, view, expect=REFUSED)
for work in (orm_insert, core_insert, lock_a_row, release_a_nested_transaction):
    inner.add(
        f"{name(work)}, then a protected request",
        Ask(work, reading, protected=True),
        expect=REFUSED,
    )
for work in (orm_insert, core_insert):
    view = Ask(work, writing, protected=True, finish=True)
    inner.add(f"{name(work)} and a commit, then a protected request", view, expect=REFUSED)


@inner.in_every_store()
def test_a_request_to_the_application_itself_costs_the_view_nothing_or_is_refused(hold, case, store):
    hold(case, store)


leased = Family(pool=2, atomic=False)
for work in (nothing, read, core_insert, orm_insert, lock_a_row, release_a_nested_transaction):
    leased.add(f"{name(work)}, then a protected request", Ask(work, writing, protected=True))
leased.add(
    "core insert and a commit, then a protected request",
    Ask(core_insert, writing, protected=True, finish=True),
)
leased.add("core insert, then an unprotected request", Ask(core_insert, writing))
leased.add("core insert, then a helper reads", Then(core_insert, helper_that_reads))


@leased.in_every_store()
def test_a_request_inside_a_view_that_is_not_atomic_costs_nothing_or_is_refused(hold, case, store):
    hold(case, store)
