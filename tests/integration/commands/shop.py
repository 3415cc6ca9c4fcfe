"""An application on each store, whose operations end in each way."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import redis
import sqlalchemy as sa
from flask import request

from flask_idempotency import OperationInterrupted, Retryable, current_operation, idempotent
from tests.contract import test_requests
from tests.integration.commands.running import ANSWER, build_console, runner
from tests.killed import Killed

KEY = "canary-key-7f3a"


class Shop(test_requests.Shop):
    """An application on a store, with a view for each way in which an operation may end."""

    def __init__(self, store: str, folder: Any, url: str, uri: str = "", **config: Any) -> None:
        usual = {
            "IDEMPOTENCY_REDIS_PREFIX": f"{folder.name}[*]:",
            "IDEMPOTENCY_MAX_RESPONSE_BYTES": 2000,
            "PROPAGATE_EXCEPTIONS": False,
            "scope": lambda: request.headers["X-User"],
        }
        uri = uri or f"sqlite:///{folder}/shop.db"
        super().__init__(store, uri, url, tables=False, **usual | config)
        self.store = store
        build_console(self.app)
        self.run = runner(self.app)
        self.during: Callable[[], object] = dict
        self.calls, self.deadly = list[str](), {1}
        views: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
            "order": (lambda: self.charge(dies=current_operation.attempt in self.deadly), {}),
            "ok": (lambda: ({"secret": ANSWER}, 201), {}),
            "wrong": (lambda: ({"secret": ANSWER}, 500), {}),
            "half": (lambda: (self.charge()[0], 500), {}),
            "free": (lambda: self.fail(Retryable), {}),
            "cut": (lambda: self.fail(Killed if current_operation.attempt == 1 else Retryable), {}),
            "seen": (lambda: self.fail(Killed), {"enforce": False}),
            "slow": (lambda: (self.during(), ({"late": True}, 201))[1], {}),
            "long": (lambda: self.fail(OperationInterrupted), {"ttl": 7 * 86400}),
            "brief": (lambda: self.fail(OperationInterrupted), {"ttl": 3600}),
            "lost": (lambda: current_operation.step("charge", lambda: float("nan")), {}),
        }
        for name, (view, options) in views.items():
            protected = idempotent(atomic=False, **options)(view)
            self.app.add_url_rule(f"/{name}", name, protected, methods=["POST"])
        if store != "redis":
            assert self.run("create-table").exit_code == 0

    def begin(self) -> None:
        """Forget what a test has done."""
        self.calls, self.deadly = list[str](), {1}
        if self.store == "redis":
            with redis.Redis.from_url(self.app.config["IDEMPOTENCY_REDIS_URL"]) as client:
                client.flushdb()
        else:
            self.sql("delete from idempotency_record")

    def charge(self, *, dies: bool = False) -> Any:
        key = current_operation.derive_key("charge")
        current_operation.step("charge", lambda: self.calls.append(key) or ANSWER)
        if dies:
            raise Killed
        return {"attempt": current_operation.attempt}, 201

    def fail(self, error: type[BaseException]) -> Any:
        raise error

    def post(self, name: str, key: str = KEY, user: str = "alice") -> Any:
        """The response, or None if the worker has died."""
        headers = {"Idempotency-Key": key, "X-User": user}
        try:
            return self.app.test_client().post(f"/{name}", json={}, headers=headers)
        except Killed:
            return None

    def begun(self, name: str, key: str = KEY) -> str:
        """Send a request; the digits of its record."""
        self.post(name, key)
        return self.digits(name, key)

    def digits(self, name: str, key: str = KEY) -> str:
        return str(self.rows("list", *self.of(name, key))[0]["key"])

    def of(self, name: str, key: str = KEY) -> list[str]:
        return ["--key", key, "--operation", name, "--scope", "alice"]

    def rows(self, *arguments: str, code: int = 0) -> Any:
        """What a command says in JSON."""
        result = self.run(*arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    def show(self, digits: str) -> Any:
        return self.rows("show", digits)[0]

    def sql(self, statement: str, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.text(statement), values)

    def page(self, path: str, **form: str) -> Any:
        """A page of the console, or the response to its form."""
        client, path = self.app.test_client(), f"/operations{path}"
        ours = {"Sec-Fetch-Site": "same-origin"}
        return client.post(path, data=form, headers=ours) if form else client.get(path)

    def close(self) -> None:
        assert self.engine.pool.checkedout() == 0
        self.engine.dispose()
