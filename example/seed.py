"""Creates the tables and two demo accounts. Run it once, never in a web worker."""

from __future__ import annotations

from typing import NamedTuple

import click
from flask.cli import with_appcontext
from sqlalchemy.dialects.postgresql import insert

from example.auth import digest
from example.models import Account, db


class DemoAccount(NamedTuple):
    name: str
    token: str
    balance: int  # cents


# Public because they are for the demo: a real token is random and shown once.
ALICE = DemoAccount("Alice", "alice-demo-token", 500_00)
BOB = DemoAccount("Bob", "bob-demo-token", 200_00)


@click.command("seed")
@with_appcontext
def command() -> None:
    """Create the tables and the demo accounts that are missing."""
    seed()
    click.echo(f"Alice's token is {ALICE.token}, Bob's is {BOB.token}.")


def seed() -> None:
    """Create what is missing; needs an application context."""
    db.create_all()  # a real application uses migrations; both create idempotency_record
    for name, token, balance in (ALICE, BOB):
        row = {"name": name, "token_digest": digest(token), "balance": balance}
        db.session.execute(insert(Account).values(row).on_conflict_do_nothing())
    db.session.commit()
