"""DBOS: the key is the workflow's id, and its one step is a transaction of a datasource."""

from __future__ import annotations

from typing import Any

from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource
from flask import request
from flask.typing import ResponseReturnValue

from bench.peers.shop import AFTER_COMMIT, Shop


def protect(shop: Shop, database_url: str, _redis_url: str) -> None:
    """Its tables lie in the shop's database; the datasource uses the shop's engine."""
    DBOS(config={"name": "peers", "system_database_url": database_url, "log_level": "ERROR"})
    with shop.app.app_context():
        source = SQLAlchemyDatasource.create(database_url, engine=shop.db.engine)

    # As PostgreSQL's default, which the other applications use; the datasource's is SERIALIZABLE.
    @source.transaction(isolation_level="READ COMMITTED")
    def save(amount: int) -> dict[str, Any]:
        return shop.pay_in(source.sql_session(), amount, commit=False)

    @DBOS.workflow()
    def pay(amount: int) -> dict[str, Any]:
        paid = save(amount)
        shop.at(AFTER_COMMIT)
        return paid

    @shop.app.post("/payments", endpoint="payments")
    def view() -> ResponseReturnValue:
        with SetWorkflowID(request.headers["Idempotency-Key"]):
            return pay(request.get_json()["amount"]), 201

    DBOS.launch()
