"""Accounts, products, payments and orders. Amounts are in cents: money and floats do not mix."""

from datetime import datetime
from typing import Any

from flask_login import UserMixin
from sqlalchemy import BigInteger, CheckConstraint, DateTime, ForeignKey, func
from sqlalchemy.orm import Mapped, mapped_column, relationship

from example.extensions import db


class Account(db.Model, UserMixin):
    """Somebody who pays."""

    __table_args__ = (CheckConstraint("balance >= 0", name="balance"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    password_hash: Mapped[str]
    token_digest: Mapped[bytes] = mapped_column(unique=True)
    balance: Mapped[int] = mapped_column(BigInteger)


class Product(db.Model):
    """Something to buy, as long as there is some."""

    __table_args__ = (CheckConstraint("stock >= 0", name="stock"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    description: Mapped[str]
    price: Mapped[int] = mapped_column(BigInteger)
    stock: Mapped[int]


class Payment(db.Model):
    """Money that left an account."""

    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"), index=True)
    amount: Mapped[int] = mapped_column(BigInteger)
    description: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())

    def to_dict(self) -> dict[str, Any]:
        about = {"id": self.id, "amount": self.amount, "description": self.description}
        return {**about, "created_at": self.created_at.isoformat()}


class Order(db.Model):
    """Goods that are paid by card.

    Its status: *reserved*, then *declined* or *confirmed* by the request; *paid* and *refunded* as soon
    as the card provider's event says so, which may even come before the request has confirmed it.
    """

    id: Mapped[int] = mapped_column(primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"), index=True)
    product_id: Mapped[int] = mapped_column(ForeignKey("product.id"))
    quantity: Mapped[int]
    amount: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str] = mapped_column(default="reserved")
    charge_id: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    product: Mapped[Product] = relationship()

    @property
    def reference(self) -> str:
        """What the card provider calls this order."""
        return f"order-{self.id}"

    def to_dict(self) -> dict[str, Any]:
        about = {"id": self.id, "status": self.status, "charge": self.charge_id}
        return {**about, "product": self.product_id, "quantity": self.quantity, "amount": self.amount}
