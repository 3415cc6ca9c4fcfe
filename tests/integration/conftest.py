"""What the tests of this folder share: shops under gunicorn, clients at the same time, a view."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

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
def open_shop(postgres, redis_server, tmp_path):
    """A function that starts gunicorn with two workers, on a fresh database; ended after the test.

    ``through`` is called with the database's URL and gives the one that the shop uses.
    """
    arrived, go_on = tmp_path / "arrived", tmp_path / "go_on"
    os.mkfifo(arrived)
    os.mkfifo(go_on)
    with ExitStack() as stack:

        def start(*arguments, through=str, **environment):
            url = postgres.database(f"workers_{next(_numbers)}")
            servers = {"DATABASE_URL": url, "REDIS_URL": redis_server.url}
            # Here and not in each worker: two that create the same table get in each other's way.
            with pytest.MonkeyPatch.context() as patch:
                for name, value in servers.items():
                    patch.setenv(name, value)
                with worker_shop.create_app().app_context():
                    worker_shop.db.engine.dispose()
            fifos = {"ARRIVED": str(arrived), "GO_ON": str(go_on)}
            environment = {**servers, **fifos, "DATABASE_URL": through(url), **environment}
            config = ("--config", gunicorn_conf.__file__, *arguments)
            address, process = stack.enter_context(running.gunicorn(APPLICATION, environment, *config))
            return Shop(address, url, process.pid, arrived, go_on)

        yield start


@pytest.fixture
def clients():
    with ThreadPoolExecutor(CLIENTS) as pool:
        yield pool


@pytest.fixture
def view(world):
    """Register a function as the protected view of POST /payments; gives the world back."""

    def register(function, **options):
        protect(world, function, **options)
        world.app.testing = True
        return world

    return register


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node, which has all slots."""
    with servers.Redis(settings={"cluster-enabled": "yes"}) as server:
        with redis.Redis.from_url(server.url) as node:
            node.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            is_ready = "cluster_state:ok"
            wait_until(lambda: is_ready in str(node.execute_command("CLUSTER", "INFO")), is_ready)
        yield server
