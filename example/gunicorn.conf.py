# ruff: noqa: N999 -- the name is the one gunicorn looks for
"""How gunicorn runs the shop: ``gunicorn -c example/gunicorn.conf.py "example:create_app()"``.

No tables are created here or in ``create_app``: several workers would do it at the same time. Run
``flask --app example seed``, or a migration, before the start.
"""

import os

# Only this machine can connect; a proxy in front does TLS.
bind = f"127.0.0.1:{os.environ.get('PORT', '8000')}"

# At least two, so that a dead worker does not take the shop down; more for more cores.
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))

# Threads, because requests mostly wait for Postgres. 8 stay below the 15 connections of SQLAlchemy's
# pool (5, and 10 more under load): each request holds one, so no thread ever waits for another's.
worker_class = "gthread"
threads = 8

# Load the application once, before the fork: errors show at the start, and memory is shared.
# Flask-Idempotency makes sure that no worker uses its parent's connections.
preload_app = True

# gunicorn kills a worker whose heartbeat stops for this long. With threads, a slow view does not stop
# it; the time limits that create_app sets in the database bound a view.
timeout = 30

# On SIGTERM, requests get this long to finish: more than any view needs. A request that is cut off
# anyway is rolled back, and its retry runs the view.
graceful_timeout = 20

# Longer than a client pauses between two requests, shorter than a proxy keeps idle connections.
keepalive = 5

# A socket for gunicornc would be one more thing in the home folder, and nobody here uses it.
control_socket_disable = True
