"""The stores beside each other, each held against the bare view on the same database."""

from __future__ import annotations

from functools import partial
from tempfile import TemporaryDirectory

import servers

from .app import make_client
from .paths import new_keys, replaying, sending
from .processors import serving
from .times import in_turns

NAMES = ("hybrid", "postgres", "postgres, atomic=False", "redis", "sql on SQLite")


def compare(rounds: int) -> str:
    """A Markdown table: first requests against the bare view, replays against the empty one."""
    rows = ["| store | first, × bare | replay, × empty |", "|---|---:|---:|"]
    with (
        servers.Postgres(settings={"autovacuum": "off"}) as postgres,
        servers.Redis() as redis,
        TemporaryDirectory() as folder,
    ):
        pids = partial(serving, redis, postgres)
        unprotected = make_client(postgres.database("unprotected"), protect=False)
        empty = sending(unprotected, "/empty", new_keys())
        for number, name in enumerate(NAMES):
            store, is_sqlite = name.partition(",")[0].partition(" ")[0], "SQLite" in name
            url = f"sqlite:///{folder}/shop.db" if is_sqlite else postgres.database(f"store_{number}")
            atomic = name not in ("redis", "postgres, atomic=False")
            client = make_client(url, redis_url=redis.url, store=store, atomic=atomic)
            bare = sending(client if is_sqlite else unprotected, "/bare", new_keys())
            first, _ = in_turns(sending(client, "/payments", new_keys()), bare, rounds, pids)
            replay, _ = in_turns(replaying(client, "/payments"), empty, rounds, pids)
            rows.append(f"| {name} | {first.ratio} | {replay.ratio} |")
    return "\n".join(rows)
