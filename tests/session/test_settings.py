"""Settings, roles, levels and maps of the session: what our own statements may not change, nor meet."""

from __future__ import annotations

import sqlalchemy as sa

from tests.differential.harness import EQUAL, ByDesign, Either, Family, NothingKept, Refused
from tests.differential.schemas import (
    TENANT,
    deferred_constraints,
    role_per_tenant,
    schema_per_tenant,
    schema_without_records,
)
from tests.session.verdicts import SOUND_OR_FAILED, SOUND_OR_REFUSED, Named, Noted, Sound

family = Family(events=False)

SHOWN = ("app.tenant", "_app._tenant", "role", "search_path", "deadlock_timeout", "lock_timeout")


def sends(*statements):
    def send(world):
        for statement in statements:
            world.sql(statement)

    return send


def pays(world):
    world.pay(1)
    world.commit()


def shows(world):
    world.show(*SHOWN)


def then(*parts):
    """A view, or what comes before one, of several parts."""

    def run(world):
        for part in parts:
            part(world)

    return run


def commits(world):
    world.commit()


def rolls_back(world):
    world.session.rollback()


# Before the view: our statements meet a role without rights, or a path that leads elsewhere.


def fails_nested(world):
    with world.catching(), world.session.begin_nested():
        world.sql("select 1 / 0")


LOCAL_ROLE, ROLE = f"set local role {TENANT}", f"set role {TENANT}"
BEFORE = {
    "a local role": (sends(LOCAL_ROLE), role_per_tenant),
    "a local role and a write": (
        then(sends(LOCAL_ROLE), lambda world: world.pay(7), lambda world: world.session.flush()),
        role_per_tenant,
    ),
    "a local path": (sends("set local search_path = tenant_a"), schema_per_tenant),
    "a local path without records": (sends("set local search_path = tenant_a"), schema_without_records),
    "a local path to nowhere but the catalog": (sends("set local search_path = ''"), None),
    "a local path and role": (
        sends("set local search_path = tenant_a, public", LOCAL_ROLE),
        then(
            role_per_tenant,
            schema_without_records,
            lambda world: world.admin_run(
                f"grant usage on schema tenant_a to {TENANT};"
                f" grant all on all tables in schema tenant_a to {TENANT}"
            ),
        ),
    ),
    "a failure in begin_nested": (
        fails_nested,
        None,
    ),
    "a role and a failure in begin_nested": (
        then(sends(LOCAL_ROLE), fails_nested),
        role_per_tenant,
    ),
}


def pays_by_name(world):
    """Into ``public``, wherever the path leads."""
    world.sql(
        "insert into public.payment (id, amount) select coalesce(max(id), 0) + 1, 3 from public.payment"
    )
    world.commit()


for what, (before, setup) in BEFORE.items():
    elsewhere = "nowhere" in what
    family.add(what, then(shows, pays_by_name if elsewhere else pays), before=before, setup=setup)
    family.add(
        f"{what}, and an error",
        then(pays_by_name if elsewhere else pays, sends("select 1 / 0")),
        before=before,
        setup=setup,
        status=500,
        expect=NothingKept(),
    )
    family.add(
        f"{what}, rolled back by the view",
        then(lambda world: world.pay(8), lambda world: world.session.flush(), rolls_back, pays_by_name)
        if not elsewhere
        else then(rolls_back, pays),
        before=before,
        setup=setup,
    )

family.add(
    "a local tenant from before the view stays after a commit",
    then(lambda world: world.show("app.tenant"), pays, lambda world: world.show("app.tenant")),
    before=sends("set local app.tenant = 'a'"),
    expect=Noted(("app.tenant a", "app.tenant a")),
)
family.add(
    "a tenant for the session from before the view stays after a commit",
    then(lambda world: world.show("app.tenant"), pays, lambda world: world.show("app.tenant")),
    before=sends("set app.tenant = 'a'"),
)


# What the view sets for a transaction outlasts its commit.


def by_function(world):
    """SQLAlchemy binds the name."""
    world.session.execute(sa.select(sa.func.set_config("app.tenant", "a", True)))


def by_function_for_the_session(world):
    world.session.execute(sa.select(sa.func.set_config("app.tenant", "a", False)))


def by_parameters_for_the_session(world):
    world.sql("select set_config('app.tenant', :value, false)", value="a")


def by_parameters(world):
    world.sql("select set_config(:name, :value, true)", name="app.tenant", value="a")


def in_begin_nested(world):
    with world.session.begin_nested():
        world.sql("set local app.tenant = 'a'")


def in_begin_nested_undone(world):
    nested = world.session.begin_nested()
    world.sql("set local app.tenant = 'a'")
    nested.rollback()


SETTINGS = {
    "func.set_config": by_function,
    "set_config with parameters": by_parameters,
    "local in begin_nested": in_begin_nested,
    "local in begin_nested, undone": in_begin_nested_undone,
    "local, then for the session": sends("set local app.tenant = 'a'", "set app.tenant = 'b'"),
    "for the session, then local": sends("set app.tenant = 'b'", "set local app.tenant = 'a'"),
    "local, then reset": sends("set local app.tenant = 'a'", "reset app.tenant"),
    "set_config for the session": sends("select set_config('app.tenant', 'a', false)"),
    "set_config for the session with parameters": by_parameters_for_the_session,
    "func.set_config for the session": by_function_for_the_session,
    "a role and a setting": sends(LOCAL_ROLE, "set local lock_timeout = '300ms'"),
    "a role for the session after a local one": sends(LOCAL_ROLE, ROLE, "reset role"),
    "a role of none": sends(LOCAL_ROLE, "set local role none"),
    "a name behind a backslash": sends(r"set local app.note = '\'; set local app.tenant = 'a'"),
}


def resets(world):
    """What the settings for the session leave is not for the next request."""
    world.session.rollback()
    world.sql("reset all")
    world.sql("reset role")
    world.sql("set app.tenant = ''")
    world.commit()


AS_WITHOUT_US = {
    "local in begin_nested, undone",
    "local, then for the session",
    "local, then reset",
    "set_config for the session",
    "set_config for the session with parameters",
    "func.set_config for the session",
    "a role for the session after a local one",
    "a role of none",
}
OUTLASTS = ByDesign(
    "SET LOCAL and set_config(…, true) last until the operation ends",
    lambda outcome: [line for line in outcome.differences if ", notes" not in line],
)

for what, do in SETTINGS.items():
    expect = EQUAL if what in AS_WITHOUT_US else OUTLASTS
    family.add(
        f"{what}, committed", then(do, shows, pays, shows, resets), setup=role_per_tenant, expect=expect
    )
    family.add(f"{what}, committed last", then(do, shows, pays), setup=role_per_tenant)
    family.add(
        f"{what}, rolled back", then(do, shows, rolls_back, shows, pays, resets), setup=role_per_tenant
    )
    family.add(
        f"{what}, in the second unit",
        then(pays, do, shows, pays, shows, pays, shows, resets),
        setup=role_per_tenant,
        expect=expect,
    )
    family.add(
        f"{what}, in each transaction",
        then(do, shows, pays, do, shows, pays),
        setup=role_per_tenant,
    )


def by_a_listener(world):
    """What PostgreSQL's row security is chosen by, in each transaction."""
    session = world.session

    def choose(_session, _transaction, connection):
        by = sa.text("select set_config('app.tenant', :tenant, true)")
        connection.execute(by, {"tenant": "a"})

    sa.event.listen(session, "after_begin", choose)
    try:
        then(shows, pays, shows, rolls_back, shows, pays, shows, commits)(world)
    finally:
        sa.event.remove(session, "after_begin", choose)


family.add("chosen by a listener", by_a_listener)

loud = Family(events=False, expect=SOUND_OR_REFUSED)
for what, statement in {
    "rows deleted at the commit": "create temporary table scratch (a int) on commit delete rows",
}.items():
    drop = ("drop table scratch",) if "scratch" in statement else ()
    loud.add(what, then(sends(statement), shows, pays, shows, sends(*drop), commits))


loud.add(
    "a user for the session",
    then(sends(f"set session authorization {TENANT}"), pays),
    setup=role_per_tenant,
    teardown=lambda world, error: world.forget_connections(),
    expect=Either((Sound(), Refused(), Named("ConfigurationError"))),
)


# A table with columns that sound like settings.


def columns(world):
    world.admin_run("create table place (local text, role text, session text)")
    world.admin_run("insert into place values ('a', 'b', 'c')")


for column in ("local", "role", "session"):
    for text in (
        f"update place set {column} = 'x'",
        f"update place\nset {column} = 'x'",
        f"with one as (select 1)\nupdate place set {column} = 'y'",
        f"insert into place values ('set local {column} = 1; set role none')",
        f"select 'set_config(', 'set local {column}'",
        f"-- set local {column} = 1\nupdate place set local = 'z'",
    ):
        family.add(f"{text!r}", then(sends(text), pays), setup=columns)


# The engine's own level, map, role and listeners.


def by_database(setting, value):
    def setup(world):
        world.admin_run(
            "do $$ begin execute format("
            f"'alter database %I set {setting} = ''{value}''', current_database()); end $$"
        )
        world.engine.dispose()

    return setup


ISOLATION = Refused("(?i)isolation|repeatable read|serializable")
reads = sends("select count(*) from account")
for level in ("repeatable read", "serializable"):
    given = "-c default_transaction_isolation=" + level.replace(" ", r"\ ")
    by_options = {"connect_args": {"options": given}}
    strict = by_database("default_transaction_isolation", level)
    for what, options in {
        "of the database": {"setup": strict},
        "of the connection's options": {"engine_options": by_options},
    }.items():
        family.add(f"{level} {what}, nothing before", pays, **options)
        family.add(f"{level} {what}, and a read", pays, before=reads, expect=ISOLATION, **options)


for chosen in (
    *({"isolation_level": level} for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")),
    {"postgresql_readonly": False},
    {"postgresql_deferrable": True},
):
    is_strict = chosen.get("isolation_level", "READ COMMITTED") != "READ COMMITTED"
    for before in (None, reads):
        end = ", and a read" if before else ""
        family.add(
            f"{chosen} of the engine{end}",
            then(
                lambda world: world.show("transaction_isolation", "transaction_deferrable"), pays, pays
            ),
            before=before,
            engine_options={"execution_options": chosen},
            expect=ISOLATION if before and is_strict else EQUAL,
        )


def fails_and_goes_on(code):
    """The view catches an error with an SQLSTATE, rolls back, and pays."""

    def view(world):
        with world.catching():
            world.sql(f"do $$ begin raise sqlstate '{code}'; end $$")
        world.session.rollback()
        pays(world)

    return view


family.add(
    "what is prepared forgotten in the view, and requests after it",
    then(pays, sends("deallocate all"), pays),
    events=False,
)

SERIALIZATION_FAILURE, UNIQUE_VIOLATION = "40001", "23505"
family.add(
    "a serialization failure that a function raises, at READ COMMITTED",
    fails_and_goes_on(SERIALIZATION_FAILURE),
)
family.add(
    "a duplicate that the view goes on from, at REPEATABLE READ",
    fails_and_goes_on(UNIQUE_VIOLATION),
    engine_options={"execution_options": {"isolation_level": "REPEATABLE READ"}},
)


def translated(amount):
    """Into the schema that the map of the engine names."""
    table = sa.Table("payment", sa.MetaData(), sa.Column("amount", sa.Integer), schema="tenant")
    return lambda world: world.session.execute(sa.insert(table).values(amount=amount))


def of_the_session(world):
    """Options of one transaction, over the engine's own; it ends with them."""
    world.session.connection(execution_options={"schema_translate_map": {"tenant": None}})


mapped = {
    "engine_options": {"execution_options": {"schema_translate_map": {"tenant": "tenant_a"}}},
    "setup": schema_per_tenant,
}
for before in (None, reads):
    end = ", and a read" if before else ""
    family.add(
        f"a map of the engine{end}",
        then(
            translated(1),
            commits,
            translated(2),
            commits,
            translated(3),
            rolls_back,
            translated(4),
            commits,
        ),
        before=before,
        **mapped,
    )
family.add(
    "a map of the session over one of the engine",
    then(of_the_session, translated(1), commits, translated(2), commits),
    **mapped,
)
family.add(
    "a map of the session before the view over one of the engine",
    then(translated(1), commits, translated(2), commits),
    before=of_the_session,
    **mapped,
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
        cursor = driver.cursor()
        cursor.execute(ROLE)
        cursor.close()
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


family.add(
    "a constraint in a hidden schema",
    then(sends(LOCAL_ROLE), pays, sends(LOCAL_ROLE), pays),
    setup=hidden_constraint,
)
family.add(
    "a role before, and a hidden schema", pays, before=sends(LOCAL_ROLE), setup=hidden_constraint
)
family.add("a deferred trigger that asks for the role", then(sends(LOCAL_ROLE), pays), setup=writes_who)
for what, before in {
    "nothing": None,
    "a read": reads,
    "another role": sends("set local role none"),
    "a write": lambda world: world.pay(7),
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


def two_in_one_place(world):
    world.sql("insert into line (position) values (1), (1)")


def two_in_one_place_for_a_while(world):
    two_in_one_place(world)
    world.sql("update line set position = id + 1")


def commits_caught(world):
    with world.catching():
        world.commit()
    world.session.rollback()
    pays(world)


for what, expect in {
    "one_position": EQUAL,
    "public.one_position": EQUAL,
    "all": SOUND_OR_FAILED,
}.items():
    deferred = sends(f"set constraints {what} deferred")
    for name, view, status in (
        ("kept", then(deferred, two_in_one_place_for_a_while, pays), 201),
        ("broken", then(deferred, two_in_one_place, pays), 500),
        ("broken and caught", then(deferred, two_in_one_place, commits_caught), 201),
    ):
        family.add(
            f"constraints {what} deferred by the view, {name}",
            view,
            setup=deferred_constraints,
            status=status,
            expect=expect,
        )


@family.in_every_store()
def test_settings_are_as_without_us(hold, case, store):
    hold(case, store)


@loud.in_every_store()
def test_what_cannot_be_known_is_refused_or_as_without_us(hold, case, store):
    hold(case, store)
