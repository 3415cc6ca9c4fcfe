"""The first page that anybody reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Flask

from flask_idempotency.testing import assert_idempotent
from laboratory.running import ROOT
from tests.docs.pages import blocks
from tests.drivers import EACH, with_driver
from tests.sessions import KINDS

README, SESSIONS = ROOT / "README.md", ROOT / "docs" / "session.md"


def quickstart(kind: str) -> str:
    """The application of the README, or that of the page on other sessions."""
    page, mark = (SESSIONS, f"file: {kind}.py") if kind != "flask-sqlalchemy" else (README, "")
    [example] = [each.text for each in blocks(page, "python") if each.mark == mark]
    return example


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_each_quickstart_runs(
    databases: Any, redis_server: Any, driver: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = databases.take()
    uri = with_driver(url, driver)
    monkeypatch.setenv("DATABASE_URL", uri)
    example = quickstart(kind).replace("sqlite:///shop.db", uri).replace('"sql"', '"hybrid"')
    redis = f'app.config["IDEMPOTENCY_REDIS_URL"] = "{redis_server.url}"\n'
    pays_once(example.replace("app = Flask(__name__)\n", f"app = Flask(__name__)\n{redis}"))
    databases.give_back(url)


def test_that_of_the_readme_needs_no_server(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/shop.db"
    pays_once(quickstart("flask-sqlalchemy").replace("sqlite:///shop.db", uri))


def pays_once(example: str) -> None:
    """Run an application, and send it what the page's table says."""
    names: dict[str, Any] = {"__name__": "quickstart"}
    exec(compile(example, "quickstart", "exec", dont_inherit=True), names)  # noqa: S102
    app: Flask = names["app"]
    engine = app.extensions["idempotency"].database
    sent: dict[str, Any] = {"json": {"amount": 5}, "headers": {"X-Account": "alice"}}
    try:
        assert assert_idempotent(app.test_client(), "POST", "/payments", **sent).status_code == 201
        assert app.test_client().post("/payments", **sent).status_code == 400
        with engine.connect() as connection:
            assert connection.scalar(sa.text("select count(*) from payment")) == 1
    finally:
        engine.dispose()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README.read_text()))
def test_its_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link.partition("#")[0]).exists()
