"""The operation is the session's own transaction: what that rests on, beside the plain application.

Each case is sent key 1 twice and key 2 twice (``tests.differential.harness``), so a retry that doubles
a row is seen. What listeners hear is not compared: events inside an operation are those of savepoints.
"""

from __future__ import annotations

import pytest

from tests.differential.conftest import hold, laboratory, run_pair
from tests.drivers import each_unless_named

__all__ = ["hold", "laboratory", "run_pair"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    each_unless_named(metafunc)
