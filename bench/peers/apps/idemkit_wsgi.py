"""idemkit: its WSGI middleware around the application."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from idemkit import HttpConfig, PostgresBackend, RedisBackend, WSGIIdempotencyMiddleware

from bench.peers.shop import Shop


def protect(
    shop: Shop, database_url: str, redis_url: str, *, backend: str, local_cache: bool = False
) -> None:
    """``backend`` is "redis" or "postgres"."""
    if backend == "redis":
        keeping = RedisBackend.from_url(redis_url)
    else:
        dsn = database_url.replace("+psycopg2", "")
        program = Path(sys.executable).with_name("idemkit")
        subprocess.run([program, "init-pg", dsn], check=True, stdout=subprocess.DEVNULL)
        keeping = PostgresBackend.from_url(dsn)
    config = HttpConfig(scope_mode="single_tenant", use_local_cache=local_cache)
    shop.app.post("/payments", endpoint="payments")(shop.view)
    shop.app.wsgi_app = WSGIIdempotencyMiddleware(  # type: ignore[method-assign]
        shop.app.wsgi_app, backend=keeping, config=config
    )
