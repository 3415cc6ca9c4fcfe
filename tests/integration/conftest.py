"""What the tests of this folder share: shops under gunicorn, clients at the same time, a view."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

import servers
from laboratory import running
from tests.integration.apps import gunicorn_conf, worker_shop
from tests.integration.shops import Shop
from tests.integration.views import protect
from tests.waiting import wait_until

APPLICATION = "tests.integration.apps.worker_shop:create_app()"
CLIENTS = 12

_numbers = itertools.count(1)


@pytest.fixture
def open_shop(postgres: Any, redis_server: Any, tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    """A function that starts gunicorn with two workers, on a fresh database; ended after the test.

    ``through`` is called with the database's URL and gives the one that the shop uses.
    """
    arrived, go_on = tmp_path / "arrived", tmp_path / "go_on"
    os.mkfifo(arrived)
    os.mkfifo(go_on)
    with ExitStack() as stack:

        def start(*arguments: str, through: Callable[[str], str] = str, **environment: str) -> Shop:
            database_url = postgres.database(f"workers_{next(_numbers)}")
            environment = {
                "DATABASE_URL": database_url,
                "REDIS_URL": redis_server.url,
                "ARRIVED": str(arrived),
                "GO_ON": str(go_on),
                **environment,
            }
            make_tables(environment)
            environment["DATABASE_URL"] = through(database_url)
            config = ("--config", gunicorn_conf.__file__)
            url, process = stack.enter_context(
                running.gunicorn(APPLICATION, environment, *config, *arguments)
            )
            return Shop(url, database_url, process.pid, arrived, go_on)

        yield start


def make_tables(environment: dict[str, str]) -> None:
    """Here and not in each worker: two that create the same table get in each other's way."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATABASE_URL", "REDIS_URL"):
            patch.setenv(name, environment[name])
        app = worker_shop.create_app()
    with app.app_context():
        worker_shop.db.engine.dispose()


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        yield pool


@pytest.fixture
def view(world: Any) -> Callable[..., Any]:
    """Register a function as the protected view of POST /payments; gives the world back."""

    def register(function: Callable[..., Any], **options: Any) -> Any:
        protect(world, function, **options)
        world.app.testing = True
        return world

    return register


@pytest.fixture(scope="module")
def cluster() -> Iterator[servers.Redis]:
    """A cluster of one node, which has all slots."""
    with servers.Redis(settings={"cluster-enabled": "yes"}) as server:
        with redis.Redis.from_url(server.url) as node:
            node.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            is_ready = "cluster_state:ok"
            wait_until(lambda: is_ready in str(node.execute_command("CLUSTER", "INFO")), is_ready)
        yield server
