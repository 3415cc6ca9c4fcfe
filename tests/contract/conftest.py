"""Failures in the contract show values, as in any test."""

import pytest

for _name in "suite", "transactions", "claims", "races":
    pytest.register_assert_rewrite(f"tests.contract.{_name}")
