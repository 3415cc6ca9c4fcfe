"""What the tests of the how-to pages share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask, g

from flask_idempotency.cli import cli
from tests.docs.pages import RECIPES, ROOT, Block, apps, commands, looks_like
from tests.killed import Killed


def outputs(app: Flask, block: Block) -> Iterator[str]:
    """Run each of the extension's commands on the block; each output is the one shown."""
    for command, shown in commands(block.text):
        arguments = shlex.split(command.removeprefix("flask idempotency "))
        output = app.test_cli_runner().invoke(cli, arguments, input="y\n").output
        assert looks_like(output, shown), f"{block.name}: {command}\n{output}"
        yield output


class Page:
    """An application with the code of a page in it, whose user is Alice.

    Of a page with several applications it is the one called ``of``. The page may also be a recipe.
    """

    def __init__(self, name: str, names: dict[str, Any], of: str = "") -> None:
        self.names, self.app, self.db = names, names["app"], names["db"]
        self.app.config["PROPAGATE_EXCEPTIONS"] = False
        self.app.before_request(self._sign_in)
        [path] = filter(Path.exists, (ROOT / "docs" / name, RECIPES / name))
        for block in apps(path)[of]:
            exec(compile(block.source, str(path), "exec"), names)  # noqa: S102
        with self.app.app_context():
            self.db.create_all()

    def _sign_in(self) -> None:
        g.account_id = "alice"

    def post(self, path: str, body: Any = None, key: str | None = "key-1", **headers: str) -> Any:
        if key is not None:
            headers["Idempotency-Key"] = key
        return self.app.test_client().post(path, json=body or {"amount": 5}, headers=headers)

    def die(self, path: str, function: str, after: bool = False) -> None:
        """Let a request die in a function of the page, before or after its work, and its lease end."""
        whole = self.names[function]

        def dies(*args: Any) -> None:
            if after:
                whole(*args)
            raise Killed

        self.names[function] = dies
        with pytest.raises(Killed):
            self.post(path)
        self.names[function] = whole
        self.end_leases()

    def end_leases(self) -> None:
        ended = "lease_expires_at = clock_timestamp() WHERE lease_expires_at IS NOT NULL"
        self.sql(f"UPDATE idempotency_record SET {ended}")

    def sql(self, statement: str) -> list[Any]:
        with self.app.app_context(), self.db.engine.begin() as connection:
            result = connection.execute(sa.text(statement))
            return list(result) if result.returns_rows else []

    def count(self, table: str) -> int:
        return self.sql(f"SELECT count(*) FROM {table}")[0][0]

    def run_command(self, *arguments: str) -> str:
        return self.app.test_cli_runner().invoke(cli, arguments).output
