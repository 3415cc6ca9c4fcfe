"""What Alembic runs for ``flask --app example db …``: the application's engine, and all its tables."""

from __future__ import annotations

from alembic import context

from example.extensions import db

# db.metadata has the shop's tables and those of Flask-Idempotency, so that autogenerate makes both.
with db.engine.connect() as connection:
    context.configure(connection=connection, target_metadata=db.metadata)
    with context.begin_transaction():
        context.run_migrations()
