"""Failures in the contract show values, as in any test."""

import pytest

for _name in "claims", "races":
    pytest.register_assert_rewrite(f"tests.contract.{_name}")
