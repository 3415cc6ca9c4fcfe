"""Settings, roles, levels and maps of the session: what our own statements may not change, nor meet."""

from __future__ import annotations

import sqlalchemy as sa

from tests.differential.harness import EQUAL, ByDesign, Family, NothingKept
from tests.differential.schemas import (
    TENANT,
    deferred_constraints,
    role_per_tenant,
    schema_per_tenant,
    schema_without_records,
)
from tests.session.cases import (
    ISOLATION,
    SOUND_OR_FAILED,
    SOUND_OR_MISTAKEN,
    SOUND_OR_REFUSED,
    commits,
    fails_nested,
    pays,
    reads,
    rolls_back,
    sends,
    strict_by_database,
    then,
    writes,
)

family = Family(events=False)

LOCAL_TENANT, LOCAL_ROLE, ROLE = (
    "set local app.tenant = 'a'",
    f"set local role {TENANT}",
    f"set role {TENANT}",
)
SHOWN = ("app.tenant", "_app._tenant", "role", "search_path", "deadlock_timeout", "lock_timeout")


def shows(world):
    world.show(*SHOWN)


# Before the view: our statements meet a role without rights, or a path that leads elsewhere.


def granted(world):
    role_per_tenant(world)
    schema_without_records(world)
    world.admin_run(
        f"grant usage on schema tenant_a to {TENANT};"
        f" grant all on all tables in schema tenant_a to {TENANT}"
    )


BEFORE = {
    "a local role and a write": (then(sends(LOCAL_ROLE), writes), role_per_tenant),
    "a local path": (sends("set local search_path = tenant_a"), schema_per_tenant),
    "a local path to nowhere but the catalog": (sends("set local search_path = ''"), None),
    "a local path and role": (sends("set local search_path = tenant_a, public", LOCAL_ROLE), granted),
    "a role and a failure in begin_nested": (then(sends(LOCAL_ROLE), fails_nested), role_per_tenant),
}
pays_by_name = then(  # into public, wherever the path leads
    sends(
        "insert into public.payment (id, amount) select coalesce(max(id), 0) + 1, 3 from public.payment"
    ),
    commits,
)
for what, (before, setup) in BEFORE.items():
    case = {"before": before, "setup": setup}
    elsewhere = "nowhere" in what
    pay = pays_by_name if elsewhere else pays
    family.add(what, then(shows, pay), **case)
    error = {"status": 500, "expect": NothingKept()}
    family.add(f"{what}, and an error", then(pay, sends("select 1 / 0")), **case, **error)
    undo = then(rolls_back, pays) if elsewhere else then(writes, rolls_back, pays_by_name)
    family.add(f"{what}, rolled back by the view", undo, **case)

for what, tenant, expect in (
    (
        "local",
        LOCAL_TENANT,
        ByDesign(  # as the whole request is one transaction
            "SET LOCAL and set_config(…, true) last until the operation ends",
            lambda outcome: [
                str(step.notes)
                for step in outcome.protected.steps[::2]
                if step.notes != ("app.tenant a", "app.tenant a")
            ],
        ),
    ),
    ("for the session", "set app.tenant = 'a'", EQUAL),
):
    family.add(
        f"a tenant from before the view, {what}",
        then(lambda world: world.show("app.tenant"), pays, lambda world: world.show("app.tenant")),
        before=sends(tenant),
        expect=expect,
    )

# What the view sets for a transaction outlasts its commit.


def by_function(is_local):
    """SQLAlchemy binds the name."""
    call = sa.select(sa.func.set_config("app.tenant", "a", is_local))
    return lambda world: world.session.execute(call) and None


def in_begin_nested_undone(world):
    nested = world.session.begin_nested()
    world.sql(LOCAL_TENANT)
    nested.rollback()


def resets(world):
    """What the settings for the session leave is not for the next request."""
    rolls_back(world)
    sends("reset all", "reset role", "set app.tenant = ''")(world)
    world.commit()


OUTLASTS = ByDesign(
    "SET LOCAL and set_config(…, true) last until the operation ends",
    lambda outcome: [line for line in outcome.differences if ", notes" not in line],
)
for what, (do, expect) in {
    "func.set_config": (by_function(True), OUTLASTS),
    "func.set_config for the session": (by_function(False), EQUAL),
    "local in begin_nested, undone": (in_begin_nested_undone, EQUAL),
    "local, then for the session": (sends(LOCAL_TENANT, "set app.tenant = 'b'"), EQUAL),
    "a role and a setting": (sends(LOCAL_ROLE, "set local lock_timeout = '300ms'"), OUTLASTS),
    "a role for the session after a local one": (sends(LOCAL_ROLE, ROLE, "reset role"), EQUAL),
}.items():
    for when, view, expected in (
        ("committed", then(do, shows, pays, shows, resets), expect),
        ("rolled back", then(do, shows, rolls_back, shows, pays, resets), EQUAL),
        ("in the second unit", then(pays, do, shows, pays, shows, pays, resets), expect),
        ("in each transaction", then(do, shows, pays, do, shows, pays), EQUAL),
    ):
        family.add(f"{what}, {when}", view, setup=role_per_tenant, expect=expected)


@family()
def chosen_by_a_listener(world):
    """What PostgreSQL's row security is chosen by, in each transaction."""

    def choose(_session, _transaction, connection):
        by = sa.text("select set_config('app.tenant', :tenant, true)")
        connection.execute(by, {"tenant": "a"})

    sa.event.listen(world.session, "after_begin", choose)
    try:
        then(shows, pays, shows, rolls_back, shows, pays, shows, commits)(world)
    finally:
        sa.event.remove(world.session, "after_begin", choose)


scratch = sends("create temporary table scratch (a int) on commit delete rows")
family.add(
    "rows deleted at the commit",
    then(scratch, pays, sends("drop table scratch"), commits),
    expect=SOUND_OR_REFUSED,
)
family.add(
    "a user for the session",
    then(sends(f"set session authorization {TENANT}"), pays),
    setup=role_per_tenant,
    teardown=lambda world, error: world.forget_connections(),
    expect=SOUND_OR_MISTAKEN,
)
family.add("what is prepared forgotten in the view", then(pays, sends("deallocate all"), pays))


# The engine's own level, map, role and listeners.

shows_level = lambda world: world.show("transaction_isolation", "transaction_deferrable")  # noqa: E731
STRICT = {
    "REPEATABLE READ of the engine": {"execution_options": {"isolation_level": "REPEATABLE READ"}},
    "SERIALIZABLE of the engine": {"isolation_level": "SERIALIZABLE"},
    "SERIALIZABLE of the connection's options": {
        "connect_args": {"options": "-c default_transaction_isolation=serializable"}
    },
}
CASES = [(what, {"engine_options": options}) for what, options in STRICT.items()]
CASES.append(("a strict level of the database", {"setup": strict_by_database("serializable")}))
for what, options in CASES:
    family.add(f"{what}, nothing before", then(shows_level, pays, pays), **options)
    family.add(f"{what}, and a read", pays, before=reads, expect=ISOLATION, **options)
for name in ("postgresql_readonly", "postgresql_deferrable"):
    for before in (None, reads):
        family.add(
            f"{name} of the engine{', and a read' if before else ''}",
            then(shows_level, pays, pays),
            before=before,
            engine_options={"execution_options": {name: name.endswith("deferrable")}},
        )


def fails_and_goes_on(code):
    """The view catches an error with an SQLSTATE, rolls back, and pays."""

    def view(world):
        with world.catching():
            world.sql(f"do $$ begin raise sqlstate '{code}'; end $$")

    return then(view, rolls_back, pays)


family.add("a serialization failure of a function, at READ COMMITTED", fails_and_goes_on("40001"))
family.add(
    "a duplicate that the view goes on from, at REPEATABLE READ",
    fails_and_goes_on("23505"),
    engine_options=STRICT["REPEATABLE READ of the engine"],
)


def translated(amount):
    """Into the schema that the map of the engine names."""
    table = sa.Table("payment", sa.MetaData(), sa.Column("amount", sa.Integer), schema="tenant")
    return lambda world: world.session.execute(sa.insert(table).values(amount=amount)) and None


def of_the_session(world):
    """Options of one transaction, over the engine's own; it ends with them."""
    world.session.connection(execution_options={"schema_translate_map": {"tenant": None}})


two = then(translated(1), commits, translated(2), commits)
for what, view, before in (
    ("of the engine", then(two, translated(3), rolls_back, translated(4), commits), None),
    ("of the engine, and a read", two, reads),
    ("of the session over one of the engine", then(of_the_session, two), None),
    ("of the session before the view over one of the engine", two, of_the_session),
):
    family.add(
        f"a map {what}",
        view,
        before=before,
        engine_options={"execution_options": {"schema_translate_map": {"tenant": "tenant_a"}}},
        setup=schema_per_tenant,
    )


def hidden_constraint(world):
    """A deferred constraint where the role may not look."""
    role_per_tenant(world)
    world.admin_run("create schema hidden")
    world.admin_run("create table hidden.a (n int unique deferrable initially deferred)")


def role_at_connect(world):
    """The engine's role is one that a listener chooses, and the only one that may write records."""
    hidden_constraint(world)
    if world.protected:
        world.admin_run(f"grant all on idempotency_record to {TENANT}")
        world.admin_run(
            "create function only_the_role() returns trigger language plpgsql as"
            f" $$ begin if current_user <> '{TENANT}' then raise 'by %', current_user; end if;"
            " return new; end $$"
        )
        world.admin_run(
            "create trigger only_the_role before insert or update on idempotency_record"
            " for each row execute function only_the_role()"
        )

    @sa.event.listens_for(world.engine, "connect")
    def choose(driver, _record):
        driver.cursor().execute(ROLE)
        driver.commit()

    world.engine.dispose()


def token_at_connect(world):
    """The password comes from a listener, as a token does; that of the URL is wrong."""
    with world.app.app_context():
        engine = world.db.engine
    password = engine.url.password

    @sa.event.listens_for(engine, "do_connect")
    def give(_dialect, _record, _args, options):
        options["password"] = password


def writes_who(world):
    """A deferred trigger notes who the role is when it is asked."""
    hidden_constraint(world)
    world.admin_run(
        "create function who() returns trigger language plpgsql as"
        " $$ begin insert into audit (text) values (current_user); return null; end $$"
    )
    world.admin_run(
        "create constraint trigger who after insert on payment deferrable initially deferred"
        " for each row execute function who()"
    )


pays_by_role = then(sends(LOCAL_ROLE), pays)
family.add("a constraint in a hidden schema", then(pays_by_role, pays_by_role), setup=hidden_constraint)
family.add("a deferred trigger that asks for the role", pays_by_role, setup=writes_who)
for what, before in {
    "nothing": None,
    "a read": reads,
    "another role": sends("set local role none"),
    "a write": writes,
}.items():
    family.add(f"a role chosen at connect, {what} before", pays, before=before, setup=role_at_connect)
    family.add(
        f"a token given at connect, {what} before",
        pays,
        before=before,
        early=token_at_connect,
        engine_options={"connect_args": {"password": "wrong"}},
    )

# Constraints that the view itself defers.

two_in_one_place = sends("insert into line (position) values (1), (1)")


def commits_caught(world):
    with world.catching():
        world.commit()


for what, expect in {"public.one_position": EQUAL, "all": SOUND_OR_FAILED}.items():
    deferred = sends(f"set constraints {what} deferred")
    for name, view, status in (
        ("kept", then(two_in_one_place, sends("update line set position = id + 1"), pays), 201),
        ("broken", then(two_in_one_place, pays), 500),
        ("broken and caught", then(two_in_one_place, commits_caught, rolls_back, pays), 201),
    ):
        family.add(
            f"constraints {what} deferred by the view, {name}",
            then(deferred, view),
            setup=deferred_constraints,
            status=status,
            expect=expect,
        )


@family.in_every_store()
def test_settings_are_as_without_us(hold, case, store):
    hold(case, store)
