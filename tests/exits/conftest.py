"""The shop on a database of its own, and who raises an error while one of its statements runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flask import Flask

from tests.databases import Databases
from tests.drivers import each_unless_named, with_driver
from tests.exits import shop
from tests.waiting import wait_until


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    each_unless_named(metafunc)


@pytest.fixture
def database(databases: Databases, driver: str, tmp_path: Any, monkeypatch: Any) -> Iterator[str]:
    """The shop's, with its tables; its address is in the environment."""
    url = databases.take()
    monkeypatch.setenv("DATABASE_URL", with_driver(url, driver))
    monkeypatch.setenv("CHARGES", str(tmp_path / "charges"))
    app = shop.create_app()
    with app.app_context():
        shop.db.create_all()
        shop.db.engine.dispose()
    yield url
    databases.give_back(url)


@pytest.fixture
def shop_app(database: str) -> Iterator[Flask]:
    """The shop. After the test its connection must be in the pool, and no transaction be open."""
    app = shop.create_app()
    yield app
    with app.app_context():
        assert shop.db.engine.pool.checkedout() == 0, "a connection was not given back"
        shop.db.engine.dispose()
    wait_until(lambda: not shop.select(shop.OPEN), "no transaction is open")


@pytest.fixture
def interrupted(shop_app: Flask) -> Callable[..., Any]:
    """In the block, a signal raises ``error`` in this thread once the server runs ``pg_sleep``."""
    main = threading.main_thread()

    @contextmanager
    def interrupting(error: BaseException) -> Iterator[None]:
        def on_signal(*_: Any) -> None:
            raise error

        def send() -> None:
            wait_until(lambda: over.is_set() or shop.select(shop.SLEEPING), "a statement sleeps")
            if not over.is_set():
                signal.pthread_kill(main.ident or 0, signal.SIGALRM)

        over, sender = threading.Event(), threading.Thread(target=send)
        before = signal.signal(signal.SIGALRM, on_signal)  # pytest-timeout's, whose timer goes on
        try:
            sender.start()
            yield
        finally:
            over.set()
            sender.join()
            signal.signal(signal.SIGALRM, before)

    return interrupting
