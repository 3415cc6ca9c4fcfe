"""Two accounts and three products to try the shop with: ``flask --app example seed``."""

from typing import NamedTuple

import click
from flask.cli import with_appcontext
from sqlalchemy.dialects.postgresql import insert
from werkzeug.security import generate_password_hash

from example.accounts import digest
from example.extensions import db
from example.models import Account, Product


class DemoAccount(NamedTuple):
    name: str
    token: str
    password: str
    balance: int  # cents


# Public because they are for the demo: a real token is random and shown once.
ALICE = DemoAccount("Alice", "alice-demo-token", "alice-demo-password", 500_00)
BOB = DemoAccount("Bob", "bob-demo-token", "bob-demo-password", 200_00)

PRODUCTS = (
    {"name": "Coffee beans", "description": "250 g, roasted yesterday", "price": 12_50, "stock": 1000},
    {"name": "Coffee mug", "description": "Stoneware, 300 ml", "price": 18_00, "stock": 200},
    {"name": "Hand grinder", "description": "Steel burrs, beech handle", "price": 89_00, "stock": 25},
)


@click.command("seed")
@with_appcontext
def command() -> None:
    """Create the demo accounts and products that are missing, in the tables that `db upgrade` makes."""
    seed()
    for account in (ALICE, BOB):
        click.echo(f"{account.name}: password {account.password}, token {account.token}")


def seed() -> None:
    for name, token, password, balance in (ALICE, BOB):
        hashed = {"password_hash": generate_password_hash(password), "token_digest": digest(token)}
        row = {"name": name, "balance": balance, **hashed}
        db.session.execute(insert(Account).values(row).on_conflict_do_nothing())
    db.session.execute(insert(Product).values(PRODUCTS).on_conflict_do_nothing())
    db.session.commit()
