"""The faults hit what they say."""

from __future__ import annotations

from typing import Any

import servers
from tests.drivers import EACH
from tests.faults.nemesis import COMPLETION


@EACH
def test_the_reply_that_is_lost_is_that_of_an_operations_own_commit(
    make_world: Any, postgres: Any, add_view: Any, assert_problem: Any
) -> None:
    with servers.FaultProxy(postgres.database("lost_reply")) as proxy:
        world = make_world(SQLALCHEMY_DATABASE_URI=proxy.url)
        runs = add_view(world)
        for key in "abc":  # a statement that was sent twice is known by its name from then on
            assert world.post(key=key).status_code == 201
        proxy.lose_answer(COMPLETION)
        problem = assert_problem(world.post(key="d"), 503, "store-unavailable", retry=True)
        assert "not known whether" in problem["detail"]
        assert (proxy.lost, runs) == (1, [1, 1, 1, 1])
        replay = world.post(key="d")
        assert replay.json == {"id": 4, "run": 4}
        assert replay.headers["Idempotent-Replayed"] == "true"
