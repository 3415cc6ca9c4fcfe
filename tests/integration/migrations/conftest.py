"""What the tests of migrations share."""

from __future__ import annotations

import logging.config
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.databases import Databases
from tests.integration.migrations.project import Project


@pytest.fixture(autouse=True)
def _logging_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A project's env.py configures the whole process, which here is that of the tests."""
    monkeypatch.setattr(logging.config, "fileConfig", lambda *args, **kwargs: None)


@pytest.fixture
def database(databases: Databases) -> Iterator[Callable[[], str]]:
    """Gives empty databases."""
    used: list[str] = []

    def take() -> str:
        used.append(databases.take())
        return used[-1]

    yield take
    for url in used:
        databases.give_back(url)


@pytest.fixture
def make_project(tmp_path: Any) -> Callable[..., Project]:
    """Begins a project; see :class:`Project`."""

    def make(build: Any, *arguments: str, **migrate: Any) -> Project:
        project = Project(tmp_path, build, **migrate)
        project.run("db", "init", *arguments)
        return project

    return make
