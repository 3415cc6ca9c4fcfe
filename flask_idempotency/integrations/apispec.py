"""A plugin for apispec, and so for what is built on it, such as flask-smorest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask import Flask

from flask_idempotency.core.errors import ConfigurationError
from flask_idempotency.web.setup.state import app_state

from .openapi import PROBLEM, complete, problem_schema

try:
    from apispec import APISpec, BasePlugin
except ImportError as error:
    raise ImportError(
        f"flask_idempotency.integrations.apispec needs apispec ({error}):"
        " pip install 'flask-idempotency[apispec]'"
    ) from error


class IdempotencyPlugin(BasePlugin):
    """Completes what apispec makes, as ``add_idempotency`` does.

    ``app`` is the application, whose routes must be registered before their paths are described. The
    plugin goes last in the list. ``prefix`` is as for ``add_idempotency``.
    """

    def __init__(self, app: Flask, *, prefix: str = "") -> None:
        self._app, self._prefix = app, prefix

    def init_spec(self, spec: APISpec) -> None:
        """Raises ``ConfigurationError`` for OpenAPI 2."""
        if spec.openapi_version.major < 3:
            raise ConfigurationError("IdempotencyPlugin needs openapi_version 3, not an older one")
        self._components = spec.components

    def operation_helper(
        self,
        path: str | None = None,
        operations: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Called by apispec for each path."""
        known, state = self._components, app_state(self._app)
        if PROBLEM not in known.schemas:
            known.schema(PROBLEM, problem_schema())
        shared: Mapping[str, Mapping[str, Any]] = {
            "responses": {**known.responses_lazy, **known.responses},
            "parameters": {**known.parameters_lazy, **known.parameters},
        }
        complete(state, self._prefix + (path or ""), operations or {}, shared)
