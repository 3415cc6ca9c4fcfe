# ruff: noqa: N999 -- the name is the one gunicorn looks for
"""How gunicorn runs the shop: ``gunicorn -c example/gunicorn.conf.py "example:create_app()"``.

No tables are created here or in ``create_app``: several workers would do it at the same time. That is
``flask --app example seed``, or a migration, before the start.
"""

import os

# One host, this machine only; a proxy in front does TLS.
bind = f"127.0.0.1:{os.environ.get('PORT', '8000')}"

# Two at least, so that one that dies does not take the shop with it; more for more cores.
workers = int(os.environ.get("WEB_CONCURRENCY", "2"))

# Threads, because requests mostly wait for Postgres. 8 stay below the 15 connections of SQLAlchemy's
# pool (5, and 10 more under load): each request holds one, so no thread ever waits for another's.
worker_class = "gthread"
threads = 8

# Load the application once, before the fork: errors show at the start, and memory is shared.
# Flask-Idempotency sees to it that no worker uses a connection of its parent's.
preload_app = True

# A worker whose heartbeat stops for as long is killed. With threads a slow view does not stop it;
# what bounds a view are the time limits that create_app sets in the database.
timeout = 30

# On SIGTERM requests get as long to finish: more than any view needs. One that is cut off all the same
# is rolled back, and its retry runs it.
graceful_timeout = 20

# Longer than a client thinks between two requests, shorter than a proxy keeps idle connections.
keepalive = 5

# A socket for gunicornc would be one more thing in the home folder, and nobody here uses it.
control_socket_disable = True
