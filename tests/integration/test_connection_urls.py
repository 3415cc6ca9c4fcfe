"""Where a URL may lead: to one of several hosts, or to a Unix socket."""

import pytest
import sqlalchemy as sa

import servers
from tests.drivers import EACH


@EACH
@pytest.mark.parametrize("way", ["several hosts", "the primary of several", "a Unix socket"])
def test_it_serves_requests(make_world, add_view, assert_replayed, postgres, way):
    url = sa.make_url(postgres.database("ways"))
    query = {"host": [f"127.0.0.1:{port}" for port in (servers.free_port(), url.port)]}
    if way == "the primary of several":
        query["target_session_attrs"] = "read-write"
    elif way == "a Unix socket":
        query = {"host": str(postgres.data), "port": str(url.port)}
    url = url.set(host=None, port=None, query=query).render_as_string(hide_password=False)
    world = make_world(SQLALCHEMY_DATABASE_URI=url, IDEMPOTENCY_REDIS_PREFIX="ways:")
    runs = add_view(world)
    assert_replayed(world.post(), world.post())
    assert runs == [1]
    world.assert_clean()
