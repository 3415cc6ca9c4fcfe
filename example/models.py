"""Accounts, payments and refunds. Amounts are in cents: money and floats do not mix."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from flask import g
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKey, Index, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The base of all models."""


db = SQLAlchemy(model_class=Base)


class Account(db.Model):  # type: ignore[name-defined, misc]
    """Somebody who pays. The database rejects a balance below zero."""

    __table_args__ = (CheckConstraint("balance >= 0"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    token_digest: Mapped[bytes] = mapped_column(unique=True)
    balance: Mapped[int] = mapped_column(BigInteger)

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name, "balance": self.balance}


class Payment(db.Model):  # type: ignore[name-defined, misc]
    """Money that left an account; ``refunded`` of it came back."""

    __table_args__ = (
        CheckConstraint("refunded BETWEEN 0 AND amount"),
        Index("payment_of_account", "account_id", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    amount: Mapped[int] = mapped_column(BigInteger)
    refunded: Mapped[int] = mapped_column(BigInteger, default=0)
    description: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "amount": self.amount,
            "refunded": self.refunded,
            "description": self.description,
            "created_at": self.created_at.isoformat(),
        }


class Refund(db.Model):  # type: ignore[name-defined, misc]
    """Money that came back."""

    id: Mapped[int] = mapped_column(primary_key=True)
    payment_id: Mapped[int] = mapped_column(ForeignKey("payment.id"), index=True)
    amount: Mapped[int] = mapped_column(BigInteger)

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "payment_id": self.payment_id, "amount": self.amount}


def lock_account() -> Account:
    """The caller's account, locked until the transaction ends.

    Every write to an account or its payments takes this lock first: two different payments wait for
    each other here, so neither reads a balance that the other is about to change, and one order of
    locks means no deadlock. ``populate_existing`` because the session may know an older balance.
    """
    mine = select(Account).where(Account.id == g.account_id).with_for_update()
    return db.session.scalars(mine, execution_options={"populate_existing": True}).one()
