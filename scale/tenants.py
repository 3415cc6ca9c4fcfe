"""Rows with a database for each tenant: one application over all of them, or one for each."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import servers
from scale.masters import Master
from scale.small_shop import TENANTS
from scale.topology import Topology

FAULTS = ("one database restarted",)


def tenant_of(key: str) -> str:
    """Whose a key is: the same in each retry."""
    return TENANTS[int(key[0], 16) % len(TENANTS)]


def tenants(application: str) -> Callable[[], AbstractContextManager[Topology]]:
    """Four PostgreSQL servers, one Redis, and two masters of an application of ``small_shop``."""

    @contextlib.contextmanager
    def opened() -> Iterator[Topology]:
        with contextlib.ExitStack() as stack:
            redis = stack.enter_context(servers.Redis())
            databases = {
                name: stack.enter_context(servers.Postgres(settings={"max_connections": 100}))
                for name in TENANTS
            }
            first = databases[TENANTS[0]]

            def restarted() -> None:
                random.choice(list(databases.values())).restart(crash=True)  # noqa: S311 -- no secret

            yield Topology(
                first.url,
                redis.url,
                lambda: first.url,
                dict(zip(FAULTS, (restarted,), strict=True)),
                environment={f"DATABASE_URL_{name}": each.url for name, each in databases.items()},
                masters=[Master(f"scale.small_shop:{application}()") for _ in range(2)],
                tenants={name: each.url for name, each in databases.items()},
                tenant_of=tenant_of,
            )

    return opened
