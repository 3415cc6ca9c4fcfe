"""What Flask's releases do differently, for tests."""

from __future__ import annotations

import inspect

from flask import Flask

BEFORE_3_2 = "ctx" not in inspect.signature(Flask.full_dispatch_request).parameters
"""A request that a view sends to its own application has the view's ``db.session`` and ``flask.g``."""
