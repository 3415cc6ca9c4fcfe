"""Views after which the record's table, or its row, cannot be seen: by path, role or policy.

Plain settings of these: ``tests.differential.tables``.
"""

from __future__ import annotations

import sqlalchemy as sa

from flask_idempotency import current_operation
from tests.differential.harness import Family, NothingKept
from tests.differential.schemas import (
    TENANT,
    role_per_tenant,
    row_level_security,
    schema_per_tenant,
    schema_without_records,
)

family = Family(setup=schema_per_tenant)


def path_in_after_begin(world):
    """The usual way to choose a tenant's schema: with each transaction."""
    schema_per_tenant(world)

    @sa.event.listens_for(world.db.session, "after_begin")
    def choose(_session, _transaction, connection):
        connection.execute(sa.text("set local search_path = tenant_a"))


def role_in_after_begin(world):
    role_per_tenant(world)

    @sa.event.listens_for(world.db.session, "after_begin")
    def choose(_session, _transaction, connection):
        connection.execute(sa.text(f"set local role {TENANT}"))


def tenant_in_after_begin(world):
    row_level_security(world)

    @sa.event.listens_for(world.db.session, "after_begin")
    def choose(_session, _transaction, connection):
        connection.execute(sa.text(f"set local role {TENANT}"))
        connection.execute(sa.text("select set_config('app.tenant', 'a', true)"))


def pay_twice(world):
    """Two transactions; what they see of each other depends on where they write."""
    world.pay(1)
    world.commit()
    world.note(world.session.query(world.Payment).count())
    world.pay(2)
    world.commit()


@family(setup=schema_without_records)
def a_view_whose_path_leads_where_no_records_are(world):
    world.sql("set search_path = tenant_a")
    world.pay()
    world.commit()


@family()
def a_view_with_an_empty_search_path(world):
    world.sql("set local search_path = ''")
    world.sql("insert into public.payment (amount) values (1)")
    world.commit()


@family(setup=None)
def a_temporary_table_named_like_that_of_the_records(world):
    world.sql("create temporary table idempotency_record (key bytea) on commit drop")
    world.pay()
    world.commit()


family.add(
    "a listener that chooses a schema for each transaction", pay_twice, setup=path_in_after_begin
)
family.add("a listener that chooses a role for each transaction", pay_twice, setup=role_in_after_begin)
family.add(
    "a listener that chooses a tenant for each transaction",
    pay_twice,
    setup=tenant_in_after_begin,
)


@family(setup=role_per_tenant, expect=NothingKept(500))
def a_view_in_another_session_authorization(world):
    world.sql(f"set local session authorization {TENANT}")
    world.pay()
    world.commit()


@family(setup=row_level_security)
def a_view_under_row_level_security(world):
    world.sql(f"set local role {TENANT}")
    world.sql("select set_config('app.tenant', 'a', true)")
    world.pay()
    world.commit()


@family(setup=row_level_security, status=403)
def a_view_that_row_level_security_stops(world):
    world.sql(f"set local role {TENANT}")
    world.sql("select set_config('app.tenant', 'a', true)")
    with world.catching():
        world.sql("insert into payment (amount, tenant) values (1, 'b')")
    world.session.rollback()
    return {}, 403


@family(setup=row_level_security)
def a_view_that_turns_row_security_off(world):
    world.sql("set local row_security = off")
    world.sql("select set_config('app.tenant', 'a', true)")
    world.pay()
    world.commit()


def in_a_step(prepare):
    """A view that is not atomic, with one step that is."""

    def view(world):
        def write():
            prepare(world)
            world.pay()
            world.commit()
            return 7

        if world.protected:
            return {"step": current_operation.step("write", write, atomic=True)}, 201
        return {"step": write()}, 201

    return view


def set_path(world):
    world.sql("set local search_path = tenant_a")


def set_path_for_good(world):
    world.sql("set search_path = tenant_a")


def set_role(world):
    world.sql(f"set local role {TENANT}")
    world.sql("select set_config('app.tenant', 'a', true)")


family.add("an atomic step that sets its search path", in_a_step(set_path), atomic=False)
family.add("an atomic step that leaves its search path", in_a_step(set_path_for_good), atomic=False)
family.add(
    "an atomic step under row level security",
    in_a_step(set_role),
    setup=row_level_security,
    atomic=False,
)
family.add(
    "an atomic step where a listener chooses the schema",
    in_a_step(lambda world: None),
    setup=path_in_after_begin,
    atomic=False,
)


@family.in_every_store()
def test_the_record_is_found_again_wherever_the_view_has_gone(hold, case, store):
    hold(case, store)
