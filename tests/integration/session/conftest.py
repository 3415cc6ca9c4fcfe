"""Everything about the session is shown on each driver; a test of what only one of them has says so."""

from __future__ import annotations

import pytest

from tests.drivers import each_unless_named

WITHOUT_A_DRIVER = {"test_contexts"}
"""What decides there meets no driver."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in WITHOUT_A_DRIVER:
        each_unless_named(metafunc)
