"""``gevent.Timeout`` in two jobs and two views, in a process that gevent has patched.

The database and the provider's file are in the environment. Writes what each came to, as JSON.
"""

from gevent import monkey

monkey.patch_all()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from functools import partial  # noqa: E402

import gevent  # noqa: E402

from tests.exits import shop  # noqa: E402
from tests.integration.apps import gunicorn_conf  # noqa: E402
from tests.waiting import wait_until  # noqa: E402

os.environ["COOPERATIVE"] = "yes"
gunicorn_conf.post_fork(None, None)  # psycopg2 lets other greenlets run
app = shop.create_app()


def time_out(name):
    work = gevent.spawn(shop.call, app, name, 30)
    wait_until(lambda: work.ready() or shop.select(shop.SLEEPING), "a statement sleeps")
    work.kill(gevent.Timeout(), block=False)
    work.join()
    assert isinstance(work.exception, gevent.Timeout), work.exception


found = {name: shop.cut_off_and_retried(app, name, partial(time_out, name)) for name in shop.CALLS}
json.dump(found, sys.stdout)
