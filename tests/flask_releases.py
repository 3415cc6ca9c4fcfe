"""What Flask's releases do differently, for tests."""

from __future__ import annotations

import inspect

from flask import Flask

BEFORE_3_2 = "ctx" not in inspect.signature(Flask.full_dispatch_request).parameters
"""A request that a view sends to its own application has the view's ``db.session`` and ``flask.g``."""

WITHOUT_THE_CONTEXT = "takes the error alone, not the context that Flask 3.2 passes before it"
LEFT_OUT = {
    "test_a_mistake_in_a_resource_is_the_frameworks_500_and_logged": {
        "flask_restful": WITHOUT_THE_CONTEXT,
        "flask_restx": WITHOUT_THE_CONTEXT,
    },
}
"""Tests that are not run from Flask 3.2 on, with which extension, and what that does."""


def is_left_out(name: str) -> bool:
    """Whether another extension is not ready for this release of Flask, so that a test cannot pass."""
    test, _, parameters = name.partition("[")
    return not BEFORE_3_2 and any(each in parameters for each in LEFT_OUT.get(test, ()))
