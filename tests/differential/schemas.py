"""Set-ups that several families share: schemas and roles of tenants, and constraints that wait."""

from __future__ import annotations

from tests.differential.worlds import World

TENANT = "differential_tenant"
"""A role that sees the payments of its tenant, and of the records nothing."""

_MAKE_ROLE = f"""
    do $$ begin
        create role {TENANT};
    exception when duplicate_object or unique_violation then null;
    end $$
"""


def schema_per_tenant(world: World) -> None:
    """A schema with tables of its own, ``idempotency_record`` among them, as migrations make it."""
    world.admin_run("create schema tenant_a")
    for table in ("payment", "account", "audit"):
        world.admin_run(f"create table tenant_a.{table} (like public.{table} including all)")
    if world.protected:
        table = "idempotency_record"
        world.admin_run(f"create table tenant_a.{table} (like public.{table} including all)")


def role_per_tenant(world: World) -> None:
    """A role that may do all with the application's tables, and nothing with the records."""
    world.admin_run(_MAKE_ROLE)
    world.admin_run(f"grant usage on schema public to {TENANT}")
    world.admin_run(f"grant all on payment, account, audit to {TENANT}")
    world.admin_run(f"grant all on all sequences in schema public to {TENANT}")


def row_level_security(world: World) -> None:
    """Payments belong to a tenant, and a role sees only its own; of the records it sees none."""
    role_per_tenant(world)
    world.admin_run(
        "alter table payment add column tenant text default current_setting('app.tenant', true)"
    )
    world.admin_run("alter table payment enable row level security")
    world.admin_run(
        "create policy own on payment using (tenant = current_setting('app.tenant', true))"
        " with check (tenant = current_setting('app.tenant', true))"
    )
    if world.protected:
        world.admin_run(f"grant all on idempotency_record to {TENANT}")
        world.admin_run("alter table idempotency_record enable row level security")


def deferred_constraints(world: World) -> None:
    """A unique number, a foreign key and a trigger that are asked at the commit only."""
    world.admin_run(
        "create table invoice (id serial primary key, number int,"
        " constraint one_number unique (number) deferrable initially deferred)"
    )
    world.admin_run(
        "create table line (id serial primary key, invoice_id int,"
        " constraint of_invoice foreign key (invoice_id) references invoice deferrable"
        " initially deferred, position int,"
        " constraint one_position unique (position) deferrable initially immediate)"
    )
    world.admin_run(
        "create function balanced() returns trigger language plpgsql as $$ begin"
        " if (select sum(balance) from account) <> 200 then"
        " raise exception 'not balanced' using errcode = '23514'; end if; return null; end $$"
    )
    world.admin_run(
        "create constraint trigger books after update on account deferrable initially deferred"
        " for each row execute function balanced()"
    )
