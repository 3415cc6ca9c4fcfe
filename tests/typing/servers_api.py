"""What a type checker sees of ``servers``. mypy reads this file; nothing runs it."""

from __future__ import annotations

from typing_extensions import assert_type

import servers


def own_and_given_servers_have_one_face() -> None:
    with servers.postgres(fsync=False, settings={"max_connections": 60}) as pg:
        assert_type(pg, servers.Postgres | servers.GivenPostgres)
        assert_type(pg.url, str)
        assert_type(pg.dsn, str)
        assert_type(pg.database("shop"), str)
        assert_type(pg.pid, int | None)
        assert_type(pg.controllable, bool)
        pg.pause()
        pg.resume()
    with servers.redis(persistent=True, settings={"maxmemory": "2mb"}) as rd:
        assert_type(rd, servers.Redis | servers.GivenRedis)
        assert_type(rd.url, str)
        rd.restart(crash=True)


def servers_of_our_own_can_be_chained() -> None:
    assert_type(servers.Postgres().start().restart(crash=True), servers.Postgres)


def the_proxy_is_steered_while_it_runs() -> None:
    with servers.FaultProxy(servers.Redis().url) as proxy:
        assert_type(proxy, servers.FaultProxy)
        assert_type(proxy.lost, int)
        proxy.delay = 0.2
        proxy.lose_answer(b"SET")
