"""``gevent.Timeout`` in a job, an atomic one and two views, in a process that gevent has patched.

The database and the provider's file are in the environment. Writes what each came to, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from gevent import monkey


def main() -> dict[str, Any]:
    import gevent

    from tests.exits import shop
    from tests.integration.apps import gunicorn_conf
    from tests.waiting import wait_until

    os.environ["COOPERATIVE"] = "yes"
    gunicorn_conf.post_fork(None, None)  # psycopg2 lets other greenlets run
    app = shop.create_app()

    def run(function: Callable[..., int], seconds: float, **options: Any) -> int:
        with app.app_context():
            name = function.__name__
            return shop.idempotency.run(name, function, seconds, scope=None, name=name, **options)

    def post(kind: str, seconds: float) -> Any:
        headers = {"Idempotency-Key": kind, "X-Seconds": str(seconds)}
        response = app.test_client().post(f"/{kind}", headers=headers)
        assert response.status_code == 201, response.text
        return response.json["attempt"]

    def timed_out(call: Callable[[float], Any]) -> str:
        """How a call ends whose time is over once the server runs its statement."""
        work = gevent.spawn(call, 30)
        wait_until(lambda: work.ready() or shop.select(shop.SLEEPING), "a statement sleeps")
        work.kill(gevent.Timeout(), block=False)
        work.join()
        return type(work.exception).__name__

    def result_of(call: Callable[[float], Any]) -> Any:
        """Retry until the server has noticed that nobody waits for the first statement."""
        told: list[Any] = []

        def is_done() -> bool:
            try:
                told.append(call(0))
            except Exception as error:  # the test sees the last one
                told.append(repr(error))
            return not isinstance(told[-1], str)

        with suppress(AssertionError):  # never
            wait_until(is_done, "the retry has a result")
        return told[-1]

    calls = {
        "job": partial(run, shop.job, atomic=False, on_interrupted="retry"),
        "atomic_job": partial(run, shop.atomic_job),
        "atomic": partial(post, "atomic"),
        "leased": partial(post, "leased"),
    }
    found = {}
    for name, call in calls.items():
        before = shop.done()
        ends = timed_out(call)
        left = shop.done()["payments"] - before["payments"]
        result = result_of(call)
        after = shop.done()
        found[name] = {
            "ends": ends,
            "left": left,
            "result": result,
            **{what: after[what] - before[what] for what in after},
        }
    found["plain"] = {"status": app.test_client().post("/plain").status_code}
    return found


if __name__ == "__main__":
    monkey.patch_all()
    json.dump(main(), sys.stdout)
