"""PostgreSQL says nothing: its host is gone, or acknowledges and does not reply. What ends the wait."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psycopg
import psycopg2
import pytest
import sqlalchemy as sa
from flask import Flask

import servers
from tests.docs.pages import RECIPES, ROOT, blocks
from tests.drivers import EACH, PSYCOPG2
from tests.integration.postgres_faults.conftest import first_time, settings
from tests.waiting import wait_until

PAGE = ROOT / "docs/go-live.md"
HELD = sa.text("select 1 /* held */")
SLACK_SECONDS = 4.0
"""The kernel's timers are coarse, and the machine may be busy."""


def code_of_the_page(name):
    on_both = [*blocks(PAGE, "python"), *blocks(RECIPES / "silent-server.md", "python")]
    [code] = [block.source for block in on_both if name in block.text]
    return code


page = Flask("page")
"""The application that the page's code configures."""
exec(compile(code_of_the_page("SQLALCHEMY_ENGINE_OPTIONS"), str(PAGE), "exec"), {"app": page})  # noqa: S102
OPTIONS = page.config["SQLALCHEMY_ENGINE_OPTIONS"]
SHORTER = {
    "connect_timeout": 2,
    "tcp_user_timeout": 2000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
}
assert all(value <= OPTIONS["connect_args"][name] for name, value in SHORTER.items())
OPTIONS["connect_args"] |= SHORTER
CONNECT, LOST, PROBED = 2, 2, 2 + 1


@pytest.fixture
def silent(make_world, postgres, add_view):
    """Makes an application with a proxy, which has a pooled connection; the page's time-outs."""
    numbers = itertools.count(1)
    with ExitStack() as proxies:

        def make(in_view=bool, in_commit=bool):
            url = postgres.database(f"silent_{next(numbers)}")
            proxy = proxies.enter_context(servers.FaultProxy(url))
            world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url, SQLALCHEMY_ENGINE_OPTIONS=OPTIONS)
            world.sql("select 1")  # so that there is one
            world.app.extensions["idempotency"].records.messages.facts()  # asked once
            last, during = first_time(lambda: in_commit(proxy)), first_time(lambda: in_view(world))
            return world, proxy, add_view(world, during=during, store=lambda _: last() or True)

        yield make


def timed_post(world, **kwargs):
    began = time.monotonic()
    return world.post(**kwargs), time.monotonic() - began


@EACH
def test_a_host_that_is_gone_costs_the_seconds_of_the_pages_time_outs(silent, assert_problem):
    """All cases at the same time: the test takes as long as the longest time-outs."""
    cases = {
        "connect": (silent(), CONNECT),
        "acknowledged connect": (silent(), CONNECT),
        "claim": (silent(), LOST + CONNECT),
        "forgotten": (silent(), LOST),
        "statement": (silent(in_view=lambda world: world.db.session.execute(HELD)), PROBED),
        "COMMIT": (silent(in_commit=lambda proxy: proxy.vanish()), LOST),
    }
    worlds, proxies = ({name: made[place] for name, (made, _) in cases.items()} for place in (0, 1))
    for name, falls_silent in ("connect", "vanish"), ("acknowledged connect", "hang"):
        with worlds[name].app.app_context():
            worlds[name].db.engine.dispose()
        getattr(proxies[name], falls_silent)()
    proxies["claim"].vanish()
    proxies["forgotten"].forget()
    proxies["statement"].hold(b"/* held */")
    with ThreadPoolExecutor(len(cases)) as threads:
        posts = {name: threads.submit(timed_post, world) for name, world in worlds.items()}
        proxies["statement"].wait_until_held()
        proxies["statement"].vanish()
    for name, ((_, _, runs), bound) in cases.items():
        response, seconds = posts[name].result()
        assert bound - 1 < seconds < bound + SLACK_SECONDS, name
        assert len(runs) == (name not in ("connect", "acknowledged connect", "claim")), name
        if name == "forgotten":
            assert response.status_code == 201
        else:
            assert_problem(response, 503, "store-unavailable", retry=True)


@(EACH if psycopg.__version__ >= "3.2" else PSYCOPG2)  # as the page says
def test_a_process_that_is_stopped_costs_the_seconds_of_the_wait_function(
    silent, driver, assert_problem
):
    """Its host acknowledges all, so no time-out of libpq counts: once in the claim, once in COMMIT."""
    names = {}
    code = code_of_the_page({"psycopg2": "set_wait_callback", "psycopg": "do_connect"}[driver])
    exec(compile(code, str(PAGE), "exec"), names)  # noqa: S102
    names["SILENCE_SECONDS"] = 1
    try:
        world, proxy, runs = silent(in_commit=lambda proxy: proxy.hang())
        response, seconds = timed_post(world)
        problem = assert_problem(response, 503, "store-unavailable", retry=True)
        assert "not known whether" in problem["detail"]
        assert 1 <= seconds < 1 + SLACK_SECONDS
        response, seconds = timed_post(world, key="key-2")
        assert_problem(response, 503, "store-unavailable", retry=True)
        assert 1 <= seconds < 2 + SLACK_SECONDS
        proxy.flow()
        assert wait_until(lambda: world.post().status_code == 201, "a retry finds out")
        assert runs[0] == 1
    finally:
        psycopg2.extensions.set_wait_callback(None)
        if driver == "psycopg":
            sa.event.remove(sa.Engine, "do_connect", names["connect"])


def test_the_row_of_a_worker_that_is_cut_off_is_free_after_the_servers_timeout(
    make_world, postgres, background, add_view, gate, retries
):
    """The server hears nothing more of the first worker; another worker can reach it."""
    url = postgres.database("cut_off")
    with servers.FaultProxy(url) as proxy:
        cut_off = make_world(
            SQLALCHEMY_DATABASE_URI=proxy.url, **settings(idle_in_transaction_session_timeout=500)
        )
        world = make_world(SQLALCHEMY_DATABASE_URI=url)
        runs, others = add_view(cut_off, during=gate), add_view(world)
        first = background(cut_off.post)
        gate.wait_until_reached()
        proxy.hang()
        assert world.post().status_code == 409
        retry = wait_until(lambda: (it := world.post()).status_code != 409 and it, "the row is free")
        gate.open()
        proxy.flow()
        retries(world, others, first.result(), total=1, committed=True)
        assert (retry.status_code, runs, others) == (201, [1], [2])
        cut_off.assert_clean()
