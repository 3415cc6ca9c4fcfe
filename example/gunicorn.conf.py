# ruff: noqa: N999 -- the name is the one gunicorn looks for
"""How gunicorn runs the shop: ``gunicorn -c example/gunicorn.conf.py "example:create_app()"``.

No tables are created here or in ``create_app``: several workers would do it at the same time. Run
``flask --app example db upgrade`` before the start.
"""

import os
import shutil
import tempfile

bind = f"127.0.0.1:{os.environ.get('PORT', '8000')}"  # for a proxy in front, which does TLS

# At least two, so that a dead worker does not take the shop down; more for more cores.
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))

# Threads, because requests mostly wait for PostgreSQL. As many as the pool in app.py has connections:
# a request holds one at a time, so no thread ever waits for another's.
worker_class = "gthread"
threads = 8

# Load the application once, before the fork: errors show at the start, and memory is shared.
preload_app = True

# gunicorn kills a worker whose heartbeat stops for this long. With threads, a slow view does not stop
# it; the time limits in the database and those of the card provider's client bound a view.
timeout = 30

# On SIGTERM, requests get this long to finish: more than any view needs. A request that is cut off
# anyway is rolled back, and its retry runs the view; an order is taken up where it was.
graceful_timeout = 20

keepalive = 5  # longer than a client pauses, shorter than a proxy keeps idle connections
control_socket_disable = True  # a file in the home folder for gunicornc, which nobody here uses

# The workers add their metrics up through files in a folder, which is empty at each start. It has to be
# known before anything imports prometheus_client.
_metrics = None
if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:  # it is, when gunicorn reads this file again
    _metrics = os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="shop-metrics-")


def on_exit(_server):
    if _metrics:
        shutil.rmtree(_metrics, ignore_errors=True)
