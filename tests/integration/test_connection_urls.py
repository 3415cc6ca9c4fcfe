"""Where a URL may lead: to one of several hosts, or to a Unix socket."""

from __future__ import annotations

import os

import sqlalchemy as sa

import servers
from tests.drivers import EACH


def hosts(url, *more):
    """Several hosts, of which only the last one is there."""
    places = [f"127.0.0.1:{servers.free_port()}", f"127.0.0.1:{url.port}"]
    return url.set(host=None, port=None, query={"host": places, **dict(more)})


def socket(url, folder):
    return url.set(host=None, port=None, query={"host": str(folder), "port": str(url.port)})


@EACH
def test_several_hosts_and_a_unix_socket_serve_requests(make_world, add_view, postgres):
    url = sa.make_url(postgres.database(f"ways_{os.urandom(3).hex()}"))
    for number, way in enumerate(
        (hosts(url), hosts(url, ("target_session_attrs", "read-write")), socket(url, postgres.data))
    ):
        world = make_world(
            SQLALCHEMY_DATABASE_URI=way.render_as_string(hide_password=False),
            IDEMPOTENCY_REDIS_PREFIX=f"way-{number}:",
        )
        runs = add_view(world)
        first, replay = world.post(key=f"key-{number}"), world.post(key=f"key-{number}")
        assert (first.status_code, replay.status_code, runs) == (201, 201, [1])
        assert replay.headers["Idempotent-Replayed"] == "true"
        assert replay.data == first.data
        world.assert_clean()
