"""Tables, classes and functions of :mod:`tests.differential.documented`, beside those of all programs.

Everything that the manuals of SQLAlchemy and PostgreSQL offer to a schema and that a view may meet: all
kinds of relationships and inheritance, natural and composite keys, versions, defaults of the server,
and functions with effects, in each place from which a statement can call one.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import sqlalchemy as sa
from flask import g, has_app_context
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.associationproxy import association_proxy
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.orm import (
    backref,
    column_property,
    composite,
    deferred,
    relationship,
    validates,
)

from tests.differential.twins import Schema
from tests.sessions import heard


class Colour(enum.Enum):
    """For a column of an enumeration, which refuses other values when they are bound."""

    RED = "red"
    BLUE = "blue"


class Point:
    """A value of two columns."""

    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y

    def __composite_values__(self) -> tuple[int, int]:
        return self.x, self.y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    __hash__ = None  # type: ignore[assignment]


def define(db: SQLAlchemy) -> SimpleNamespace:
    """The classes, on the metadata of ``db``."""
    column, key = sa.Column, sa.ForeignKey
    base: Any = db.Model

    class Journal(base):
        id = column(sa.Integer, primary_key=True)
        text = column(sa.Text)

    book_tag = sa.Table(
        "book_tag",
        db.metadata,
        column("book_id", key("book.id"), primary_key=True),
        column("tag_name", key("tag.name"), primary_key=True),
    )

    class Tag(base):
        name = column(sa.Text, primary_key=True)

    class Book(base):
        id = column(sa.Integer, primary_key=True)
        title = column(sa.Text, nullable=False, unique=True)
        price = column(sa.Numeric(10, 2), sa.CheckConstraint("price >= 0"), server_default="5")
        touched = column(sa.Integer, server_default="0", onupdate=sa.text("7 * 6"))
        author_id = column(sa.Integer, key("author.id"))
        version = column(sa.Integer, nullable=False)
        author = relationship("Author", back_populates="books")
        tags = relationship(Tag, secondary=book_tag, backref=backref("books", order_by=title))
        labels = association_proxy("tags", "name", creator=lambda name: Tag(name=name))
        __mapper_args__: ClassVar = {"version_id_col": version}

        @hybrid_property
        def dear(self) -> Any:
            return self.price > 10

        @validates("title")
        def refuse(self, _name: str, title: str) -> str:
            if title == "invalid":
                raise ValueError(title)
            return title

    class Letter(base):
        id = column(sa.Integer, primary_key=True)
        text = column(sa.Text)
        author_id = column(sa.Integer, key("author.id", ondelete="CASCADE"), nullable=False)

    class Author(base):
        id = column(sa.Integer, primary_key=True)
        name = column(sa.Text, nullable=False, unique=True)
        born = column(sa.Integer, server_default="1900")
        slug = column(sa.Text)
        motto = deferred(column(sa.Text, server_default="none"))
        books = relationship(
            Book, back_populates="author", cascade="all, delete-orphan", order_by=Book.title
        )
        dear_books = relationship(
            Book,
            viewonly=True,
            primaryjoin="and_(Author.id == Book.author_id, Book.price > 10)",
        )
        letters = relationship(Letter, cascade="all, delete-orphan", passive_deletes=True)
        written = relationship(Letter, lazy="write_only", passive_deletes=True, overlaps="letters")
        unsaved = relationship(Book, cascade="", viewonly=False, overlaps="books,author")
        __mapper_args__: ClassVar = {"eager_defaults": True}

    its_books = sa.select(sa.func.count(Book.id)).where(Book.author_id == Author.id)
    Author.count = column_property(its_books.correlate_except(Book).scalar_subquery())

    class Node(base):
        id = column(sa.Integer, primary_key=True)
        name = column(sa.Text, nullable=False)
        parent_id = column(sa.Integer, key("node.id", deferrable=True, initially="DEFERRED"))
        dearest_id = column(sa.Integer, key("node.id"))
        children = relationship(
            "Node", foreign_keys=[parent_id], backref=backref("parent", remote_side="Node.id")
        )
        dearest = relationship(
            "Node", foreign_keys=[dearest_id], remote_side="Node.id", post_update=True, uselist=False
        )

    class Person(base):
        id = column(sa.Integer, primary_key=True)
        kind = column(sa.Text, nullable=False)
        name = column(sa.Text, unique=True)
        __mapper_args__: ClassVar = {"polymorphic_on": "kind", "polymorphic_identity": "person"}

    class Clerk(Person):
        desk = column(sa.Integer)
        __tablename__ = None
        __mapper_args__: ClassVar = {"polymorphic_identity": "clerk"}

    class Driver(Person):
        id = column(sa.Integer, key("person.id"), primary_key=True)
        licence = column(sa.Text, unique=True)
        __mapper_args__: ClassVar = {"polymorphic_identity": "driver"}

    class Country(base):
        code = column(sa.Text, primary_key=True)
        cities = relationship("City", passive_updates=True, order_by="City.name")

    class City(base):
        name = column(sa.Text, primary_key=True)
        country_code = column(sa.Text, key("country.code", onupdate="CASCADE"))

    class OrderLine(base):
        __tablename__ = "Order Line"
        __table_args__ = (sa.UniqueConstraint("Item's %name", name="One % of 'each'"),)
        order = column("Order No", sa.Integer, primary_key=True, autoincrement=False)
        position = column("position", sa.Integer, primary_key=True, autoincrement=False)
        item = column("Item's %name", sa.Text)
        x = column("X", sa.Integer)
        y = column("Y", sa.Integer)
        at = composite(Point, x, y)

    class Measure(base):
        name = column(sa.Text, primary_key=True)
        number = column(sa.Float)
        amount = column(sa.Numeric)
        payload = column(sa.LargeBinary)
        document = column(JSONB)
        many = column(ARRAY(sa.Integer))
        colour = column(sa.Enum(Colour, native_enum=False))
        token = column(sa.Uuid)
        day = column(sa.Date)

    odd = sa.Table(
        "Weird Table",
        db.metadata,
        column("Key", sa.Text, primary_key=True),
        column("select", sa.Integer, server_default="1"),
        schema="Odd Schema",
    )
    counter = sa.Sequence("Odd Counter", metadata=db.metadata)
    _listen(db, Author, Book, Journal)
    return SimpleNamespace(
        **{each.__name__: each for each in base.__subclasses__()},
        Clerk=Clerk,
        Driver=Driver,
        odd=odd,
        counter=counter,
    )


def _keep(_session: Any, found: Any) -> None:
    """Keep what is loaded: an identity map forgets it whenever memory is tidied up."""
    if has_app_context():
        g.setdefault("alive", []).append(found)


def _hear(name: str) -> Any:
    def hear(*_: Any) -> None:
        if has_app_context():
            g.setdefault("heard", []).append(name)

    return hear


def _listen(db: SQLAlchemy, author: Any, book: Any, journal: Any) -> None:
    """What the manual's chapter on events shows: some only listen, two write."""
    for name in ("pending_to_persistent", "loaded_as_persistent"):
        event.listen(heard(db), name, _keep)
    for name in ("after_commit", "after_rollback", "after_flush", "after_soft_rollback"):
        event.listen(heard(db), name, _hear(name))

    def write_journal(session: Any, *_: Any) -> None:
        titles = [each.title for each in session.new if isinstance(each, book)]
        for title in titles:
            if title.startswith("evented"):
                session.add(journal(text=f"before flush of {title}"))

    def fill_slug(_mapper: Any, _connection: Any, target: Any) -> None:
        target.slug = target.name.lower()

    def write_directly(_mapper: Any, connection: Any, target: Any) -> None:
        if target.title.startswith("evented"):
            connection.execute(sa.insert(journal.__table__).values(text="after insert"))

    event.listen(heard(db), "before_flush", write_journal)
    event.listen(author, "before_insert", fill_slug)
    event.listen(book, "after_insert", write_directly)


BEFORE_TABLES = """create schema if not exists "Odd Schema";"""

SET_UP = """
    create schema made;
    create schema audit_log;
    create function note_it(text) returns int language plpgsql volatile as $$ begin
        insert into journal (text) values ('note ' || $1); return 1; end $$;
    create function "Weird Name"(text) returns int language plpgsql as $$ begin
        insert into journal (text) values ('weird ' || $1); return 2; end $$;
    create function audit_log.record(text) returns int language sql as $$
        insert into journal (text) values ('log ' || $1) returning 3 $$;
    create function "Odd Schema"."Do It"(text) returns setof int language sql as $$
        insert into journal (text) values ('do it ' || $1) returning 4 $$;
    create function note_and_fail(text) returns int language plpgsql as $$ begin
        insert into journal (text) values ('fails ' || $1);
        raise exception 'no' using errcode = '23514'; end $$;
    create function note_and_catch(text) returns int language plpgsql as $$ begin
        begin insert into author (name) values ('Austen');
        exception when unique_violation then insert into journal (text) values ('caught ' || $1); end;
        return 5; end $$;
    create function lock_author(text) returns int language sql as $$
        select born from author where name = $1 for update $$;
    create function lock_all(int) returns int language plpgsql as $$ begin
        perform pg_advisory_xact_lock($1); return 1; end $$;
    create function tell(text) returns void language sql as $$ select pg_notify('news', $1) $$;
    create procedure work(text) language plpgsql as $$ begin
        insert into journal (text) values ('work ' || $1); end $$;
    create procedure work_and_commit(text) language plpgsql as $$ begin
        insert into journal (text) values ('work ' || $1); commit; end $$;

    create view calm as select name, born from author;
    create view writable as select name from author;
    create function write_through() returns trigger language plpgsql as $$ begin
        insert into author (name) values (new.name || ' (view)'); return new; end $$;
    create trigger through instead of insert on writable
        for each row execute function write_through();
    create materialized view stale_names as select name from author;

    create function note_state(int, int) returns int language plpgsql as $$ begin
        insert into journal (text) values ('aggregate'); return coalesce($1, 0) + $2; end $$;
    create aggregate note_total(int) (sfunc = note_state, stype = int, initcond = '0');

    create table guarded (label text);
    insert into guarded values ('g');
    alter table guarded enable row level security;
    alter table guarded force row level security;

    create function on_author() returns trigger language plpgsql as $$ begin
        if new.name = 'forbidden' then raise exception 'forbidden' using errcode = 'P0001'; end if;
        if new.name like 'noted%' then perform note_it(new.name); end if;
        if new.name like 'told%' then perform pg_notify('news', new.name); end if;
        return new; end $$;
    create trigger watch before insert or update on author for each row execute function on_author();

    create table seat (number int constraint one_seat unique deferrable initially immediate);
    grant usage on schema "Odd Schema", audit_log to programs_clerk;
    grant all on all tables in schema public, "Odd Schema" to programs_clerk;
    grant all on all sequences in schema public to programs_clerk;
"""

_TABLES = (
    *("journal", "author", "book", "letter", "tag", "book_tag", "node", "person", "driver", "country"),
    *("city", '"Order Line"', "measure", '"Odd Schema"."Weird Table"', "seat"),
)

_EVERY_ROW = " ".join(
    f"union all select '{table}', case when to_jsonb(t)::text like '%note above%' then 'z' else '' end"
    f" || to_jsonb(t)::text, '', '' from {table} t"
    for table in _TABLES
)

ROWS = f"""{_EVERY_ROW}
    union all select 'made', relname, '', '' from pg_class
        where relnamespace = 'made'::regnamespace and relkind = 'r'
    union all select 'large object', oid::text, '', '' from pg_largeobject_metadata"""

CLEAR = """
    do $$ declare found text; begin
        for found in select format('drop table made.%I cascade', relname) from pg_class
            where relnamespace = 'made'::regnamespace and relkind = 'r' loop execute found; end loop;
        perform lo_unlink(oid) from pg_largeobject_metadata;
    end $$;
    delete from book_tag; delete from tag; delete from letter; delete from book; delete from author;
    delete from journal; delete from node; delete from driver; delete from person; delete from city;
    delete from country; delete from "Order Line"; delete from measure; delete from seat;
    delete from "Odd Schema"."Weird Table";
    select setval(c.oid, 10, false) from pg_class c where relkind = 'S';
    insert into author (id, name, born) values (1, 'Austen', 1775), (2, 'Bronte', 1816);
    insert into book (id, title, price, author_id, version) values
        (1, 'Emma', 10, 1, 1), (2, 'Persuasion', 20, 1, 1);
    insert into letter (id, text, author_id) values (1, 'dear', 1);
    insert into tag values ('old'), ('new');
    insert into book_tag values (1, 'old');
    insert into node (id, name, parent_id) values (1, 'root', null), (2, 'leaf', 1);
    insert into person (id, kind, name) values (1, 'clerk', 'Bob'), (2, 'driver', 'Ann');
    insert into driver values (2, 'B');
    insert into country values ('GB'); insert into city values ('Bath', 'GB');
    insert into "Order Line" values (1, 1, 'tea', 0, 0);
    insert into measure (name, number) values ('nan', 'NaN'), ('one', 1);
    insert into "Odd Schema"."Weird Table" values ('k', 1);
    insert into seat values (1), (2);
"""

DOCUMENTED = Schema(define, BEFORE_TABLES, SET_UP, ROWS, CLEAR)

HIDDEN = {
    "a view": "create view busy as select note_it('view') as number;",
    "a namesake": """
        create function "lower"(text, int) returns text language plpgsql as $$ begin
            insert into journal (text) values ('overloaded ' || $1); return $1; end $$;""",
    "a namesake in a schema": """
        create function "Odd Schema".upper(text) returns text language plpgsql as $$ begin
            insert into journal (text) values ('upper ' || $1); return $1; end $$;""",
    "an operator": """
        create function note_sum(int, int) returns int language plpgsql as $$ begin
            insert into journal (text) values ('operator'); return $1 + $2; end $$;
        create operator @+@ (leftarg = int, rightarg = int, function = note_sum);""",
    "an attribute": """
        create function note_author(author) returns text language plpgsql as $$ begin
            insert into journal (text) values ('attribute'); return 'noted'; end $$;""",
    "a domain": """
        create function note_check(text) returns bool language plpgsql as $$ begin
            insert into journal (text) values ('domain'); return true; end $$;
        create domain checked as text check (note_check(value));""",
    "a cast": """
        create type wrapped as (inside text);
        create function wrap(text) returns wrapped language plpgsql as $$ begin
            insert into journal (text) values ('cast'); return row($1)::wrapped; end $$;
        create cast (text as wrapped) with function wrap(text);""",
    "a policy": """
        create function note_policy() returns bool language plpgsql as $$ begin
            insert into public.journal (text) values ('policy'); return true; end $$;
        create policy noting on guarded using (note_policy());""",
}
"""What makes a read write that names no function, or one of the server's: where there is one of these,
no read is surely one."""

WITH_HIDDEN = replace(DOCUMENTED, set_up=SET_UP + "".join(HIDDEN.values()))
