"""Steps from SQLAlchemy's manual of the ORM: what a view may do with classes and its session.

Each is written as the manual shows it, with the classes of :mod:`tests.differential.documented_schema`.
What is seen is noted without numbers that a sequence has given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from flask import g
from sqlalchemy import orm
from sqlalchemy.dialects.postgresql import insert as upsert

from tests.differential.documented_schema import Point
from tests.differential.steps import Hand, step


def author(hand: Hand, name: str = "Austen", **options: Any) -> Any:
    """The author of this name. Fails as ``one()`` does if there is none."""
    kind = hand.run.twin.models.Author
    return hand.session.scalars(sa.select(kind).filter_by(name=name), **options).one()


def book(hand: Hand, title: str = "Emma") -> Any:
    """The book of this title."""
    kind = hand.run.twin.models.Book
    return hand.session.scalars(sa.select(kind).filter_by(title=title)).one()


def itself(hand: Hand) -> orm.Session:
    """The session that a scoped one stands for."""
    found: orm.Session = getattr(hand.session, "registry", lambda: hand.session)()
    return found


# Relationships and cascades


@step("write an author")
def write_an_author(hand: Hand, name: str) -> None:
    models = hand.run.twin.models
    books = [models.Book(title=f"{name} {number}") for number in (1, 2)]
    letters = [models.Letter(text=name)]
    hand.session.add(models.Author(name=name, books=books, letters=letters))


@step("write a book")
def write_a_book(hand: Hand, title: str) -> None:
    """By the backref: the session is given the book along with its author."""
    hand.run.twin.models.Book(title=title, author=author(hand))


@step("write a book that does not cascade")
def write_unsaved(hand: Hand) -> Any:
    its_author, its_book = author(hand), hand.run.twin.models.Book(title="not saved")
    its_author.unsaved.append(its_book)
    return its_book in hand.session


@step("orphan a book")
def orphan_a_book(hand: Hand) -> None:
    found = author(hand)
    found.books.remove(found.books[0])


@step("give a book away")
def give_a_book_away(hand: Hand) -> Any:
    found = book(hand)
    found.author = author(hand, "Bronte")
    return [each.title for each in found.author.books]


@step("delete an author")
def delete_an_author(hand: Hand, name: str) -> None:
    hand.session.delete(author(hand, name))


@step("tag a book")
def tag_a_book(hand: Hand, name: str) -> Any:
    found = book(hand)
    found.tags.append(hand.session.merge(hand.run.twin.models.Tag(name=name)))
    return sorted(found.labels)


@step("tag by a proxy")
def tag_by_a_proxy(hand: Hand, name: str) -> None:
    found = book(hand)
    found.labels.append(name)


@step("untag a book")
def untag_a_book(hand: Hand) -> None:
    found = book(hand)
    found.tags.clear()


@step("write a letter only")
def write_a_letter(hand: Hand) -> None:
    found = author(hand)
    found.written.add(hand.run.twin.models.Letter(text="only"))
    hand.session.execute(found.written.insert().values(text="in bulk"))


@step("grow the tree")
def grow_the_tree(hand: Hand) -> None:
    node = hand.run.twin.models.Node
    root = hand.session.scalars(sa.select(node).filter_by(name="root")).one()
    root.children.append(node(name="new leaf", children=[node(name="newer leaf")]))


@step("a cycle of two")
def a_cycle(hand: Hand) -> None:
    """Each is the other's dearest: one update comes after both inserts."""
    node = hand.run.twin.models.Node
    one = node(name="one")
    one.dearest = node(name="two", dearest=one)
    hand.session.add(one)


@step("a child of nobody")
def a_child_of_nobody(hand: Hand) -> None:
    """Its parent is missing until the commit."""
    hand.session.add(hand.run.twin.models.Node(name="lost", parent_id=777))


@step("the parent comes later")
def the_parent_comes_later(hand: Hand) -> None:
    hand.session.add(hand.run.twin.models.Node(name="found", id=777))


@step("rename a natural key")
def rename_a_natural_key(hand: Hand) -> Any:
    country = hand.session.get(hand.run.twin.models.Country, "GB")
    if country is None:
        return "gone"
    country.code = "UK"
    hand.session.flush()
    return [city.country_code for city in country.cities]


@step("swap a unique key")
def swap_a_unique_key(hand: Hand) -> None:
    """Deleted and written anew in one flush."""
    hand.session.delete(book(hand))
    hand.session.add(hand.run.twin.models.Book(title="Emma", price=3))


@step("composite")
def composite(hand: Hand, position: int) -> Any:
    line = hand.run.twin.models.OrderLine
    hand.session.add(line(order=1, position=position, item=f"100% of %(x)s {position}", at=Point(3, 4)))
    found = hand.session.scalars(sa.select(line).where(line.at == Point(3, 4))).first()
    return found and found.item


@step("change a composite")
def change_a_composite(hand: Hand) -> Any:
    found = hand.session.get(hand.run.twin.models.OrderLine, (1, 1))
    if found is None:
        return "gone"
    found.at = Point(9, 9)
    found.order = 2


@step("inherit")
def inherit(hand: Hand, name: str) -> None:
    models = hand.run.twin.models
    hand.session.add_all(
        [models.Clerk(name=f"clerk {name}", desk=1), models.Driver(name=f"driver {name}", licence=name)]
    )


@step("read polymorphic")
def read_polymorphic(hand: Hand, how: str) -> Any:
    models = hand.run.twin.models
    if how == "with":
        everybody = orm.with_polymorphic(models.Person, "*")
        found = hand.session.scalars(sa.select(everybody).order_by(everybody.name))
    else:
        load = orm.selectin_polymorphic(models.Person, [models.Driver])
        found = hand.session.scalars(sa.select(models.Person).options(load).order_by("name"))
    return [[type(each).__name__, each.name, getattr(each, "licence", None)] for each in found]


@step("change the inherited")
def change_the_inherited(hand: Hand) -> Any:
    driver = hand.session.scalars(sa.select(hand.run.twin.models.Driver)).first()
    if driver is None:
        return "gone"
    driver.name, driver.licence = "Anna", "A"


@step("delete the inherited")
def delete_the_inherited(hand: Hand) -> None:
    for each in hand.session.scalars(sa.select(hand.run.twin.models.Driver)):
        hand.session.delete(each)


# Loading


LOADS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "lazy": lambda kind, books: [],
    "joined": lambda kind, books: [orm.joinedload(kind.books)],
    "selectin": lambda kind, books: [orm.selectinload(kind.books).selectinload(books.tags)],
    "subquery": lambda kind, books: [orm.subqueryload(kind.books)],
    "raise": lambda kind, books: [orm.raiseload(kind.books)],
    "contains": lambda kind, books: [orm.contains_eager(kind.books)],
    "only": lambda kind, books: [orm.load_only(kind.name), orm.undefer(kind.motto)],
    "criteria": lambda kind, books: [orm.with_loader_criteria(books, books.price > 10)],
}
"""By name, how an author's books are loaded."""


@step("load books")
def load_books(hand: Hand, how: str) -> Any:
    kind = hand.run.twin.models.Author
    loads = LOADS[how](kind, hand.run.twin.models.Book)
    asked = sa.select(kind).options(*loads).order_by(kind.name)
    if how == "contains":
        asked = asked.join(kind.books).order_by(hand.run.twin.models.Book.title)
    found = hand.session.scalars(asked).unique().all()
    return [[each.name, [its.title for its in each.books], each.motto] for each in found]


@step("read computed")
def read_computed(hand: Hand) -> Any:
    kind = hand.run.twin.models.Book
    dear = hand.session.scalars(sa.select(kind.title).where(kind.dear).order_by(kind.title)).all()
    found = author(hand)
    return [dear, found.count, [each.title for each in found.dear_books], found.born]


@step("get")
def get(hand: Hand, how: str) -> Any:
    kind, options = hand.run.twin.models.Book, {}
    if how == "options":
        options = {"options": [orm.joinedload(kind.author)], "populate_existing": True}
    elif how == "for update":
        options = {"with_for_update": {"nowait": True, "of": kind}}
    elif how == "missing":
        return repr(hand.session.get(kind, -1))
    elif how == "None":
        return repr(hand.session.get(kind, None))
    found = hand.session.get(kind, 1, **options)
    return found and [found.title, str(found.price), found.version]


@step("keep a book")
def keep_a_book(hand: Hand) -> Any:
    hand.loaded_book = book(hand)
    return hand.loaded_book.title


def kept(hand: Hand) -> Any:
    return hand.loaded_book if hand.loaded_book is not None else book(hand)


@step("read the kept book")
def read_the_kept_book(hand: Hand) -> Any:
    """Expired by a commit, it is read once more."""
    found = kept(hand)
    its_author = found.author
    return [found.title, str(found.price), found.touched, its_author and its_author.name]


@step("change the kept book")
def change_the_kept_book(hand: Hand, what: str) -> None:
    found = kept(hand)
    if what == "price":
        found.price = (found.price or 0) + 1
    elif what == "expression":
        found.price = type(found).price + 1
    elif what == "negative":
        found.price = -1
    elif what == "title":
        found.title = "Persuasion"
    else:
        found.title = "invalid"


@step("refresh the kept book")
def refresh_the_kept_book(hand: Hand, how: str) -> None:
    options: Any = {
        "plain": {},
        "for update": {"with_for_update": True},
        "nowait": {"with_for_update": {"nowait": True}},
        "attribute": {"attribute_names": ["price", "tags"]},
    }
    hand.session.refresh(kept(hand), **options[how])


@step("state of the kept book")
def state_of_the_kept_book(hand: Hand, how: str) -> Any:
    found = kept(hand)
    if how == "expire":
        hand.session.expire(found)
    elif how == "expire one":
        hand.session.expire(found, ["price"])
    elif how == "expunge":
        hand.session.expunge(found)
    elif how == "add again":
        hand.session.add(found)
    elif how == "delete":
        hand.session.delete(found)
    elif how == "merge":
        hand.loaded_book = hand.session.merge(found)
    elif how == "merge without load":
        hand.loaded_book = hand.session.merge(found, load=False)
    elif how == "transient":
        orm.make_transient(found)
        found.id, found.title, found.version = None, "transient", None
        hand.session.add(found)
    elif how == "transient to detached":
        other = type(found)(id=2, version=1)
        orm.make_transient_to_detached(other)
        hand.session.add(other)
        return other.title
    seen = sa.inspect(found)
    names = ("transient", "pending", "persistent", "deleted", "detached")
    return [name for name in names if getattr(seen, name)]


@step("look at the session")
def look_at_the_session(hand: Hand) -> Any:
    session = hand.session
    changed = sorted(str(session.is_modified(each)) for each in session.dirty)
    return [len(session.new), changed, len(session.deleted), session.is_active]


@step("look at the transaction")
def look_at_the_transaction(hand: Hand) -> Any:
    session = itself(hand)
    return [session.in_transaction(), session.in_nested_transaction(), session.is_active]


# Versions, and rows that have gone


@step("be overtaken")
def be_overtaken(hand: Hand) -> None:
    """Another version is there when the flush comes: StaleDataError."""
    found = book(hand)
    hand.session.execute(sa.text("update book set version = version + 1 where title = 'Emma'"))
    found.price = 11
    hand.session.flush()


@step("lose a row")
def lose_a_row(hand: Hand, how: str) -> Any:
    found = book(hand, "Persuasion")
    hand.session.execute(sa.text("delete from book where title = 'Persuasion'"))
    if how == "refresh":
        hand.session.refresh(found)
    elif how == "expire":
        hand.session.expire(found)
        return found.title
    elif how == "delete":
        hand.session.delete(found)
        hand.session.flush()
    else:
        found.price = 1
        hand.session.flush()


# Bulk, and statements by classes


@step("bulk")
def bulk(hand: Hand, how: str) -> Any:
    models, session = hand.run.twin.models, hand.session
    rows = [{"name": f"bulk {number}", "born": number} for number in range(3)]
    if how == "insert":
        session.execute(sa.insert(models.Author), rows)
    elif how == "returning":
        statement = sa.insert(models.Author).returning(models.Author, sort_by_parameter_order=True)
        return [each.name for each in session.scalars(statement, rows)]
    elif how == "expressions":
        statement = sa.insert(models.Author).values(slug=sa.func.lower("UP"))
        session.execute(statement.returning(models.Author.slug), rows).all()
    elif how == "mappings":
        session.bulk_insert_mappings(models.Author, rows, return_defaults=True)
    elif how == "update":
        session.execute(sa.update(models.Author), [{"id": 1, "born": 7}, {"id": 2, "born": 8}])
    elif how == "update mappings":
        session.bulk_update_mappings(models.Author, [{"id": 1, "motto": "bulk"}])
    elif how == "many":
        session.execute(sa.insert(models.Tag), [{"name": f"t{number}"} for number in range(1500)])
        return session.execute(sa.delete(models.Tag).where(models.Tag.name.like("t%"))).rowcount
    elif how == "none":
        session.execute(sa.insert(models.Journal), [])
    else:
        session.execute(sa.insert(models.Author), [*rows, {"name": "Austen", "born": None}])


@step("update by class")
def update_by_class(hand: Hand, how: Any) -> Any:
    kind, session = hand.run.twin.models.Book, hand.session
    found = kept(hand)
    statement = sa.update(kind).where(kind.price < 15).values(price=kind.price + 1)
    if how == "returning":
        return sorted(session.scalars(statement.returning(kind.title)))
    done = session.execute(statement, execution_options={"synchronize_session": how}).rowcount
    return [done, str(found.price)]


@step("delete by class")
def delete_by_class(hand: Hand, how: Any) -> Any:
    kind = hand.run.twin.models.Letter
    statement = sa.delete(kind).where(kind.author_id.in_([1, None]))
    return hand.session.execute(statement, execution_options={"synchronize_session": how}).rowcount


@step("upsert")
def upsert_authors(hand: Hand, how: str) -> Any:
    kind = hand.run.twin.models.Author
    rows = [{"name": "Austen", "born": 1}, {"name": "Eliot", "born": 2}]
    statement = upsert(kind).values(rows)
    if how == "nothing":
        statement = statement.on_conflict_do_nothing(index_elements=["name"]).returning(kind.name)
        return sorted(hand.session.scalars(statement))
    if how == "nothing at all":
        return hand.session.execute(upsert(kind).values(rows[:1]).on_conflict_do_nothing()).rowcount
    changes = {"born": statement.excluded.born}
    statement = statement.on_conflict_do_update(index_elements=["name"], set_=changes).returning(kind)
    found = hand.session.scalars(statement, execution_options={"populate_existing": True})
    return sorted([each.name, each.born] for each in found)


@step("upsert twice")
def upsert_twice(hand: Hand) -> None:
    """ON CONFLICT DO UPDATE cannot change one row twice: an error."""
    kind = hand.run.twin.models.Author
    statement = upsert(kind).values([{"name": "x"}, {"name": "x"}])
    changes = {"born": statement.excluded.born}
    hand.session.execute(statement.on_conflict_do_update(index_elements=["name"], set_=changes))


# Streams


def _streamed(hand: Hand, then: Callable[[Any], object]) -> list[str]:
    """The names of the authors that are read one by one, and what is done with each."""
    kind = hand.run.twin.models.Author
    asked = sa.select(kind).order_by(kind.name).execution_options(yield_per=1)
    seen = []
    for each in hand.session.scalars(asked):
        seen.append(each.name)
        if then(each) == "enough":
            break
    return seen


def _change(found: Any) -> None:
    found.born = 5


def _commit(hand: Hand) -> None:
    hand.run.committed = True
    hand.session.commit()


def _partitions(hand: Hand) -> Any:
    kind = hand.run.twin.models.Author
    options = {"stream_results": True}
    result = hand.session.execute(sa.select(kind).order_by(kind.name), execution_options=options)
    return [[each.name for (each,) in some] for some in result.partitions(1)]


def _closed_early(hand: Hand) -> Any:
    kind = hand.run.twin.models.Author
    asked = sa.select(kind).order_by(kind.name).execution_options(yield_per=1)
    with hand.session.execute(asked) as result:
        return result.scalars().fetchmany(1)[0].name


def _buffered(hand: Hand) -> Any:
    """All rows are with the client when the commit comes."""
    kind = hand.run.twin.models.Author
    result = hand.session.execute(sa.select(kind.name).order_by(kind.name))
    _commit(hand)
    return list(result.scalars())


_WRITE = sa.text("update author set born = born + 1")

STREAMS: dict[str, Callable[[Hand], Any]] = {
    "yield_per": lambda hand: _streamed(hand, _change),
    "partitions": _partitions,
    "left early": lambda hand: _streamed(hand, lambda _: "enough"),
    "closed early": _closed_early,
    "written meanwhile": lambda hand: _streamed(hand, lambda _: hand.session.execute(_WRITE)),
    "buffered": _buffered,
}
"""By name, how rows are read one by one."""


@step("iterate")
def iterate(hand: Hand, how: str) -> Any:
    return STREAMS[how](hand)


# The session


@step("begin twice")
def begin_twice(hand: Hand) -> None:
    hand.session.begin()


@step("no autoflush")
def no_autoflush(hand: Hand, *inner: Any) -> None:
    with hand.session.no_autoflush:
        hand.perform_all(inner)


@step("nested, then its own rollback")
def nested_then_rollback(hand: Hand, *inner: Any) -> None:
    with hand.session.begin_nested() as savepoint:
        hand.perform_all(inner)
        savepoint.rollback()


@step("nested, then its own commit")
def nested_then_commit(hand: Hand, *inner: Any) -> None:
    savepoint = hand.session.begin_nested()
    hand.perform_all(inner)
    savepoint.commit()


@step("in a savepoint of the connection")
def in_a_savepoint_of_the_connection(hand: Hand, *inner: Any) -> None:
    with hand.session.connection().begin_nested():
        hand.perform_all(inner)


@step("a session on the connection")
def a_session_on_the_connection(hand: Hand, mode: str) -> None:
    """A session that joins the view's own connection, as the manual does it for tests."""
    kind = hand.run.twin.models.Journal
    connection = hand.session.connection()
    with orm.Session(connection, join_transaction_mode=mode) as session:
        session.add(kind(text=f"joined {mode}"))
        session.commit()


@step("autoflush off")
def autoflush_off(hand: Hand, *inner: Any) -> None:
    session = itself(hand)
    session.autoflush = False
    try:
        hand.perform_all(inner)
    finally:
        session.autoflush = True


@step("the scoped session")
def the_scoped_session(hand: Hand) -> Any:
    scoped = hand.run.twin.db.session
    if not hasattr(scoped, "registry"):
        return "left out"  # Flask-SQLAlchemy-Lite has none
    return [scoped() is scoped.registry(), scoped.registry.has(), scoped().info == {}]


@step("reset the session")
def reset_the_session(hand: Hand) -> None:
    hand.session.reset()


@step("expunge everything")
def expunge_everything(hand: Hand) -> None:
    hand.session.expunge_all()


@step("audit by a session of the engine")
def audit_by_a_session(hand: Hand, label: str) -> None:
    """A connection of the view's own, by a sessionmaker of its own: it commits for itself."""
    make = orm.sessionmaker(hand.run.twin.db.engine)
    with make.begin() as session:
        session.execute(sa.text("insert into audit values (:label)"), {"label": label})
    hand.run.audits.append(label)


@step("what listeners heard")
def what_listeners_heard(hand: Hand) -> Any:
    return g.pop("heard", [])


@step("copy by query")
def copy_by_query(hand: Hand) -> Any:
    """The legacy Query, which the manual still has."""
    kind = hand.run.twin.models.Author
    query = hand.session.query(kind).filter(kind.name != "x")
    return [query.count(), query.order_by(kind.name).first().name, query.exists().select().is_select]


def _missing(hand: Hand) -> Any:
    return hand.session.scalars(sa.select(hand.run.twin.models.Author).filter_by(name="nobody")).one()


def _several(hand: Hand) -> Any:
    return hand.session.scalars(sa.select(hand.run.twin.models.Author)).one()


def _duplicate(hand: Hand) -> None:
    hand.session.add(hand.run.twin.models.Author(name="Austen"))
    hand.session.flush()


def _duplicate_identity(hand: Hand) -> None:
    models = hand.run.twin.models
    hand.session.add_all([models.Country(code="FR"), models.Country(code="FR")])
    hand.session.flush()


def _pending_rollback(hand: Hand) -> None:
    try:
        _duplicate(hand)
    except sa.exc.IntegrityError:
        hand.session.execute(sa.text("select 1"))


def _detached(hand: Hand) -> Any:
    found = author(hand)
    hand.session.expunge(found)
    return found.books


def _measure(hand: Hand, **values: Any) -> None:
    hand.session.add(hand.run.twin.models.Measure(name="wrong", **values))
    hand.session.flush()


def _forbidden(hand: Hand) -> None:
    hand.session.add(hand.run.twin.models.Author(name="forbidden"))
    hand.session.flush()


def _in_after_flush(hand: Hand) -> None:
    """The second of a unit's rows fails, when others are written."""
    models = hand.run.twin.models
    hand.session.add_all([models.Journal(text="first"), models.Author(name="Bronte")])
    hand.session.flush()


def _no_foreign_key(hand: Hand) -> None:
    hand.session.add(hand.run.twin.models.Letter(text="x", author_id=-5))
    hand.session.flush()


def _null_key(hand: Hand) -> None:
    hand.session.add(hand.run.twin.models.Tag())
    hand.session.flush()


FAILURES = {
    "no row": _missing,
    "several rows": _several,
    "duplicate": _duplicate,
    "duplicate identity": _duplicate_identity,
    "pending rollback": _pending_rollback,
    "detached": _detached,
    "enumeration": lambda hand: _measure(hand, colour="green"),
    "json": lambda hand: _measure(hand, document=object()),
    "uuid": lambda hand: _measure(hand, token="none"),
    "bytes": lambda hand: _measure(hand, payload="text"),
    "date": lambda hand: _measure(hand, day="yesterday?"),
    "trigger": _forbidden,
    "second of two": _in_after_flush,
    "foreign key": _no_foreign_key,
    "null key": _null_key,
}
"""By name, ways of the ORM to fail."""


@step("fail by ORM")
def fail_by_orm(hand: Hand, how: str) -> Any:
    found = FAILURES[how](hand)
    return repr(found) if found is None else "no error"
