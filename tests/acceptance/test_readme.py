"""The first page that anybody reads."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import requests
from flask import Flask

from example.demo import ROOT
from example.tour import STEPS

README = (ROOT / "README.md").read_text()


def test_it_fits_on_a_page() -> None:
    assert len(README.splitlines()) <= 100


@pytest.mark.parametrize("store", ["sql", "hybrid"])
def test_its_example_runs(postgres: Any, redis_server: Any, tmp_path: Path, store: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    uri = f"sqlite:///{tmp_path}/shop.db" if store == "sql" else postgres.database("readme")
    example = example.replace("sqlite:///shop.db", uri).replace('"sql"', f'"{store}"')
    if store != "sql":
        redis = f'app.config["IDEMPOTENCY_REDIS_URL"] = "{redis_server.url}"\n'
        example = example.replace("db = SQLAlchemy(app)", redis + "db = SQLAlchemy(app)")
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(example, "README.md", "exec"), names)  # noqa: S102
    app: Flask = names["app"]
    try:
        headers = {"Idempotency-Key": str(uuid.uuid4()), "X-Account": "alice"}
        client = app.test_client()
        first = client.post("/payments", json={"amount": 5}, headers=headers)
        retry = client.post("/payments", json={"amount": 5}, headers=headers)
        misuse = client.post("/payments", json={"amount": 6}, headers=headers)
        without = client.post("/payments", json={"amount": 5}, headers={"X-Account": "alice"})
        assert [first.status_code, retry.status_code] == [201, 201]
        assert retry.headers["Idempotent-Replayed"] == "true"
        assert retry.data == first.data
        assert [misuse.status_code, without.status_code] == [422, 400]
        with app.app_context():
            assert names["db"].session.query(names["Payment"]).count() == 1
    finally:
        with app.app_context():
            names["db"].engine.dispose()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README))
def test_its_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_it_leads_to_every_page(page: Path) -> None:
    # The front page of the built ones says much the same, and the changelog is beside the README.
    assert page.name in {"index.md", "changelog.md"} or f"(docs/{page.name})" in README


def test_the_lines_for_curl_are_the_requests_of_the_check() -> None:
    request = requests.Request("POST", "http://shop/payments", STEPS[0].headers("k"))
    line = STEPS[0].curl("http://shop", "k")
    assert all(f"-H '{name}: {value}'" in line for name, value in request.headers.items())
