"""``gevent.Timeout`` in a job, an atomic one and two views, in a process that gevent has patched.

The database and the provider's file are in the environment. Writes what each came to, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
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

    def time_out(name: str) -> None:
        work = gevent.spawn(shop.call, app, name, 30)
        wait_until(lambda: work.ready() or shop.select(shop.SLEEPING), "a statement sleeps")
        work.kill(gevent.Timeout(), block=False)
        work.join()
        assert isinstance(work.exception, gevent.Timeout), work.exception

    return {name: shop.cut_off_and_retried(app, name, partial(time_out, name)) for name in shop.CALLS}


if __name__ == "__main__":
    monkey.patch_all()
    json.dump(main(), sys.stdout)
