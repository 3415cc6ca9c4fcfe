"""Flask-Migrate makes everything by itself, and then finds nothing more to do."""

import re

import pytest
import sqlalchemy as sa

from tests.integration.migrations.conftest import Project, create_all, read, shop

CATALOG = """
    with ours as (select * from pg_class where relname like '%ecord%' and relkind = 'r')
    select 'table', relnamespace::regnamespace || '.' || relname,
           concat(array_to_string(reloptions, ' '), ' ', obj_description(oid, 'pg_class'))
      from ours
    union all
    select 'column', relname || '.' || attname,
           concat_ws(' ', format_type(atttypid, atttypmod), attnotnull,
                     col_description(attrelid, attnum))
      from ours join pg_attribute on attrelid = ours.oid where attnum > 0
    union all
    select 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
      from ours join pg_index on indrelid = ours.oid
    order by 1, 2"""
"""Everything that our tables are, the names of their indexes and constraints included."""

CONVENTION = {"ix": "ix %(column_0_N_label)s", "pk": "pk_%(table_name)s"}


@pytest.mark.parametrize(("convention", "name"), [({}, "idempotency_record"), (CONVENTION, "Record")])
def test_a_migration_makes_what_create_all_makes_and_goes_back_and_forward(
    database, tmp_path, convention, name
):
    def build(url):
        metadata = sa.MetaData(naming_convention=convention) if convention else None
        return shop(url, metadata, IDEMPOTENCY_TABLE=name)

    one, other = database(), database()
    project = Project(tmp_path, lambda: build(one))
    assert name in project.new_revision()
    project.run("db", "upgrade")
    project.run("db", "downgrade")
    assert read(build(one), CATALOG) == []
    project.run("db", "upgrade")
    create_all(build(other))
    made = read(build(one), CATALOG)
    assert made == read(build(other), CATALOG)
    assert [row[2] for row in made if "fillfactor=92" in row[2]]
    project.assert_complete()


def test_what_a_table_lacks_is_added_and_nothing_else_changed(database, tmp_path):
    url = database()
    create_all(shop(url))
    read(shop(url), "alter table idempotency_record drop column audit")
    read(shop(url), "drop index ix_idempotency_record_leased")
    project = Project(tmp_path, lambda: shop(url))
    source = project.new_revision()
    upgrade = source[source.index("def upgrade") : source.index("def downgrade")]
    assert re.findall(r"op\.(?!batch_alter_table)(\w+)\(.*?'(\w+)'", upgrade) == [
        ("add_column", "audit"),
        ("create_index", "ix_idempotency_record_leased"),
    ]
    assert "postgresql_where=sa.text('lease_expires_at IS NOT NULL')" in upgrade
    project.run("db", "upgrade")
    project.assert_complete()


def test_a_bind_gets_the_tables_and_the_others_do_not(database, tmp_path):
    first, ledger = database(), database()
    binds = {"SQLALCHEMY_BINDS": {"ledger": ledger}, "IDEMPOTENCY_BIND_KEY": "ledger"}
    project = Project(tmp_path, lambda: shop(first, **binds), "--multidb")
    project.new_revision()
    project.run("db", "upgrade")
    assert read(shop(first), CATALOG) == []
    assert read(shop(ledger), CATALOG)
    project.assert_complete()


def test_sqlite(tmp_path):
    project = Project(tmp_path, lambda: shop(f"sqlite:///{tmp_path}/shop.db"))
    project.new_revision()
    project.run("db", "upgrade")
    project.assert_complete()
