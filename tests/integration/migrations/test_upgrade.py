"""From the tables of the release before to the present ones, and back, while requests run."""

from __future__ import annotations

import itertools
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flask_idempotency import current_operation, idempotent
from tests.docs.pages import ROOT, blocks
from tests.integration.migrations.catalog import CATALOG
from tests.integration.migrations.project import create_all, read, shop
from tests.integration.migrations.tables import EARLIER, make_earlier

REVISION = 'revision = "upgrade"\ndown_revision = None\n'


def write_revision(project):
    """The revision as the page on upgrades shows it."""
    (block,) = blocks(ROOT / "docs/upgrade.md", "python")
    (project.folder / "versions" / "upgrade.py").write_text(REVISION + block.text)


@pytest.fixture
def earlier(database):
    """A database as the release before made it."""
    url = database()
    create_all(shop(url))
    read(shop(url), EARLIER)
    return url


def test_a_migration_is_generated_with_exactly_what_is_new(earlier, make_project):
    project = make_project(lambda: shop(earlier))
    source = project.new_revision()
    upgrade = source[source.index("def upgrade") : source.index("def downgrade")]
    assert re.findall(r"op\.(?!batch_alter_table)(\w+)\(.*?'(\w+)'", upgrade) == [
        ("add_column", "audit"),
        ("create_index", "ix_idempotency_record_leased"),
    ]
    assert "postgresql_where=sa.text('lease_expires_at IS NOT NULL')" in upgrade
    project.db("upgrade")
    assert project.new_revision() == ""
    assert "advice" not in project.idempotency("check")


def test_the_pages_migration_makes_all_that_is_new_and_takes_it_back(earlier, database, make_project):
    before, now = read(shop(earlier), CATALOG), database()
    create_all(shop(now))
    project = make_project(lambda: shop(earlier))
    write_revision(project)
    project.db("upgrade")
    assert read(shop(earlier), CATALOG) == read(shop(now), CATALOG)
    assert project.new_revision() == ""
    project.db("downgrade", "base")
    assert [row for row in read(shop(earlier), CATALOG) if "dropped" not in row[1]] == before


def until_done(project, *arguments):
    """Run a command of Flask-Migrate again as long as the table is not free, as the page says."""
    for _ in range(50):
        try:
            return project.db(*arguments)
        except AssertionError as error:
            if "lock timeout" not in str(error):
                raise
    pytest.fail("the table was never free")


class Clients:
    """Send first requests and their retries, one after the other, until they are told to stop."""

    def __init__(self, world):
        self._world, self._stop, self._numbers = world, threading.Event(), itertools.count()
        self.bad, self.count = [], 0

    def __enter__(self):
        self._pool = ThreadPoolExecutor(3)
        self._running = [self._pool.submit(self._send) for _ in range(3)]
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._pool.shutdown()
        for each in self._running:
            each.result()

    def _send(self):
        while not self._stop.is_set():
            number = next(self._numbers)
            path = "/calls" if number % 2 else "/payments"
            answers = [self._world.post(path, key=f"key-{number}") for _ in range(2)]
            self.count += 1
            told = [(each.status_code, each.headers.get("Idempotent-Replayed")) for each in answers]
            if told != [(201, None), (201, "true")]:
                self.bad.append((path, told, answers[0].text))

    def go_on(self, count=20):
        """Return when they have sent so many more."""
        end = self.count + count
        while self.count < end and not self.bad:
            self._stop.wait(0.01)


@pytest.mark.parametrize("how", ["migration", "create-table"])
def test_no_request_fails_while_the_tables_are_upgraded(make_world, add_view, make_project, how):
    world = make_world()
    make_earlier(world)
    add_view(world)

    @world.app.post("/calls")
    @idempotent(atomic=False)
    def call():
        return {"first": current_operation.step("first", lambda: 1)}, 201

    project = make_project(lambda: shop(world.app.config["SQLALCHEMY_DATABASE_URI"]))
    write_revision(project)
    with Clients(world) as clients:
        clients.go_on()
        if how == "migration":
            until_done(project, "upgrade")
            clients.go_on()
            until_done(project, "downgrade", "base")
            clients.go_on()
            until_done(project, "upgrade")
        else:
            project.idempotency("create-table")
        clients.go_on()
    assert clients.bad == []
    assert "advice" not in project.idempotency("check")
    assert world.count() + world.count("idempotency_record_step") == clients.count
