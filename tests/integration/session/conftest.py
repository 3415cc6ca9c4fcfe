"""What decides about the session is shown on each driver, and many cases beside the plain application.

Such a case is sent key 1 twice and key 2 twice (``tests.differential.harness``), so that a doubled row
is seen. What listeners hear is not compared: events inside an operation are those of savepoints.
"""

from __future__ import annotations

import pytest

from tests.differential.conftest import hold, laboratory
from tests.drivers import each_unless_named

__all__ = ["hold", "laboratory"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not metafunc.module.__name__.endswith("test_contexts"):  # there no driver is met
        each_unless_named(metafunc)
