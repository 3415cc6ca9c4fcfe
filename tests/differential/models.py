"""The tables and classes that programs work with, and functions of the server with effects.

Beside the first few: what the manuals of SQLAlchemy and PostgreSQL offer to a schema that ends in more
than the statement that a view sent, such as versions, events that write, and functions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import sqlalchemy as sa
from flask import g, has_app_context
from sqlalchemy import event

from tests.sessions import heard


def define(db: Any) -> SimpleNamespace:
    """The classes, on the metadata of ``db``."""
    column, key, base = sa.Column, sa.ForeignKey, db.Model
    for name in ("audit", "held"):
        sa.Table(name, db.metadata, column("label", sa.Text))
    sa.Table("tally", db.metadata, column("label", sa.Text), column("amount", sa.Integer))

    class Item(base):
        id = column(sa.Integer, primary_key=True)
        label = column(sa.Text, nullable=False, unique=True)
        amount = column(sa.Integer, sa.CheckConstraint("amount >= 0"), nullable=False)
        owner = column(
            sa.Text, server_default=sa.text("nullif(current_setting('app.tenant', true), '')")
        )

    class Journal(base):
        id = column(sa.Integer, primary_key=True)
        text = column(sa.Text)

    class Book(base):
        id = column(sa.Integer, primary_key=True)
        title = column(sa.Text, nullable=False, unique=True)
        price = column(sa.Numeric(10, 2), sa.CheckConstraint("price >= 0"), server_default="5")
        touched = column(sa.Integer, server_default="0", onupdate=sa.text("7 * 6"))
        author_id = column(sa.Integer, key("author.id"))
        version = column(sa.Integer, nullable=False)
        __mapper_args__: ClassVar = {"version_id_col": version}

    class Author(base):
        id = column(sa.Integer, primary_key=True)
        name = column(sa.Text, nullable=False, unique=True)
        born = column(sa.Integer, server_default="1900")
        __mapper_args__: ClassVar = {"eager_defaults": True}

    class Node(base):
        id = column(sa.Integer, primary_key=True)
        name = column(sa.Text, nullable=False)
        parent_id = column(sa.Integer, key("node.id", deferrable=True, initially="DEFERRED"))

    _listen(db, Book, Journal)
    return SimpleNamespace(**{each.__name__: each for each in base.__subclasses__()})


def _listen(db: Any, book: Any, journal: Any) -> None:
    """What the manual's chapter on events shows: some only listen, two write."""

    def hear(name: str) -> Any:
        return lambda *_: has_app_context() and g.setdefault("heard", []).append(name)

    def keep(_session: Any, found: Any) -> None:
        """An identity map forgets what was loaded whenever memory is tidied up."""
        if has_app_context():
            g.setdefault("alive", []).append(found)

    for name in ("pending_to_persistent", "loaded_as_persistent"):
        event.listen(heard(db), name, keep)
    for name in ("after_commit", "after_rollback", "after_flush", "after_soft_rollback"):
        event.listen(heard(db), name, hear(name))

    def is_evented(found: Any) -> bool:
        return isinstance(found, book) and found.title.startswith("evented")

    def write_journal(session: Any, *_: Any) -> None:
        session.add_all([journal(text=each.title) for each in session.new if is_evented(each)])

    def write_directly(_mapper: Any, connection: Any, target: Any) -> None:
        if is_evented(target):
            connection.execute(sa.insert(journal.__table__).values(text="after insert"))

    event.listen(heard(db), "before_flush", write_journal)
    event.listen(book, "after_insert", write_directly)


LOCK_TIMEOUT = "40ms"
"""How long a view waits for itself, in both applications."""

SET_UP = f"""
    do $$ begin create role programs_clerk; exception when duplicate_object then null; end $$;
    do $$ begin
        execute format('alter database %I set lock_timeout = ''{LOCK_TIMEOUT}''', current_database());
    end $$;
    insert into held values ('held');
    create schema elsewhere;
    create schema made;
    create schema audit_log;
    create table elsewhere.item (like public.item including all);
    create table seat (number int constraint one_seat unique deferrable initially immediate);

    create function note_it(text) returns int language plpgsql volatile as $$ begin
        insert into journal (text) values ('note ' || $1); return 1; end $$;
    create function "Weird Name"(text) returns int language plpgsql as $$ begin
        insert into journal (text) values ('weird ' || $1); return 2; end $$;
    create function audit_log.record(text) returns int language sql as $$
        insert into journal (text) values ('log ' || $1) returning 3 $$;
    create function note_and_fail(text) returns int language plpgsql as $$ begin
        insert into journal (text) values ('fails ' || $1);
        raise exception 'no' using errcode = '23514'; end $$;
    create function lock_author(text) returns int language sql as $$
        select born from author where name = $1 for update $$;
    create procedure work(text) language plpgsql as $$ begin
        insert into journal (text) values ('work ' || $1); end $$;
    create procedure work_and_commit(text) language plpgsql as $$ begin
        insert into journal (text) values ('work ' || $1); commit; end $$;

    create function on_author() returns trigger language plpgsql as $$ begin
        if new.name = 'forbidden' then raise exception 'forbidden' using errcode = 'P0001'; end if;
        if new.name like 'noted%' then perform note_it(new.name); end if;
        if new.name like 'told%' then perform pg_notify('news', new.name); end if;
        return new; end $$;
    create trigger watch before insert or update on author for each row execute function on_author();

    grant usage on schema public, elsewhere, audit_log to programs_clerk;
    grant all on all tables in schema public, elsewhere to programs_clerk;
    grant all on all sequences in schema public to programs_clerk;
"""

HIDDEN = """
    create function "lower"(text, int) returns text language plpgsql as $$ begin
        insert into journal (text) values ('overloaded ' || $1); return $1; end $$;
    create function note_sum(int, int) returns int language plpgsql as $$ begin
        insert into journal (text) values ('operator'); return $1 + $2; end $$;
    create operator @+@ (leftarg = int, rightarg = int, function = note_sum);
    create view busy as select note_it('view') as number;
"""
"""What makes a read write that names no function, or one of the server's: where there is one of these,
no read is surely one."""

ONLY_FOR_THE_OWNER = """
    revoke all on idempotency_record from programs_clerk;
    create table elsewhere.idempotency_record (like public.idempotency_record including all);
"""
"""Whoever changes role or path no longer finds the record by its bare name."""

_TABLES = ("journal", "author", "book", "node", "seat")

ROWS = (
    """
    select 'item', label, amount::text, owner from public.item
    union all select 'elsewhere', label, amount::text, owner from elsewhere.item
    union all select 'tally', label, amount::text, '' from tally
    union all select 'audit', label, '', '' from audit
    union all select 'made', relname, '', '' from pg_class
        where relnamespace = 'made'::regnamespace and relkind = 'r'
    union all select 'large object', oid::text, '', '' from pg_largeobject_metadata """
    + " ".join(
        f"union all select '{table}', case when to_jsonb(t)::text like '%note above%' then 'z' else ''"
        f" end || to_jsonb(t)::text, '', '' from {table} t"
        for table in _TABLES
    )
    + " order by 1, 2, 3, 4"
)

CLEAR = """
    do $$ declare found text; begin
        for found in select format('drop table made.%I cascade', relname) from pg_class
            where relnamespace = 'made'::regnamespace and relkind = 'r' loop execute found; end loop;
        perform lo_unlink(oid) from pg_largeobject_metadata;
    end $$;
    delete from book; delete from author; delete from journal; delete from node;
    delete from seat;
    delete from public.item; delete from elsewhere.item;
    delete from tally; delete from audit;
    select setval(c.oid, 10, false) from pg_class c where relkind = 'S';
    insert into public.item (id, label, amount) values (1, 'old', 10), (2, 'older', 20);
    insert into tally values ('till', 0);
    insert into author (id, name, born) values (1, 'Austen', 1775), (2, 'Bronte', 1816);
    insert into book (id, title, price, author_id, version) values
        (1, 'Emma', 10, 1, 1), (2, 'Persuasion', 20, 1, 1);
    insert into node (id, name, parent_id) values (1, 'root', null), (2, 'leaf', 1);
    insert into seat values (1), (2);
"""
