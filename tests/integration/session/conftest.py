"""Everything about the session is shown on each driver; a test of what only one of them has says so."""

from __future__ import annotations

import pytest

from tests.drivers import each_unless_named


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    each_unless_named(metafunc)
