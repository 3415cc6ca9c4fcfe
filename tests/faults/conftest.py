from __future__ import annotations

import pytest

import servers.urls


@pytest.fixture(autouse=True)
def _names_the_driver(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The databases made in a test have its driver in their URLs, as with ``--driver``."""
    monkeypatch.setattr(servers.urls, "driver", driver)
