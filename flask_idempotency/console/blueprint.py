"""The blueprint of the operator's page."""

from __future__ import annotations

from collections.abc import Callable

from flask import Blueprint
from werkzeug.wrappers import Response

from flask_idempotency.core.errors import ConfigurationError, IdempotencyError, shown
from flask_idempotency.operate.decide import ACTS
from flask_idempotency.web.routes import app_state

from . import access, pages, record_page

_ACTION = f"<any({', '.join(ACTS)}):action>"


def console_blueprint(authorize: Callable[[], object], name: str) -> Blueprint:
    """See :meth:`flask_idempotency.Idempotency.console_blueprint`."""
    if not callable(authorize):
        raise ConfigurationError(
            f"authorize is {shown(authorize)}; allowed: a callable that is asked in each request"
        )
    blueprint = Blueprint(
        name, __name__, url_prefix=f"/{name}", static_folder="static", static_url_path="/static"
    )

    @blueprint.before_request
    def admit() -> Response | None:
        return access.admit(authorize)

    blueprint.after_request(access.secure)
    blueprint.register_error_handler(IdempotencyError, pages.refused)
    blueprint.add_url_rule("/", "overview", pages.overview)
    blueprint.add_url_rule("/records", "records", pages.records, methods=["GET", "POST"])
    blueprint.add_url_rule("/records/<digits>", "record", record_page.record)
    blueprint.add_url_rule("/records/<digits>/body", "body", record_page.body, methods=["POST"])
    blueprint.add_url_rule(f"/records/<digits>/{_ACTION}", "confirm", record_page.confirm)
    blueprint.add_url_rule(f"/records/<digits>/{_ACTION}", "act", record_page.act, methods=["POST"])
    # Raises ConfigurationError before init_app.
    blueprint.record(lambda setup: app_state(setup.app))  # type: ignore[arg-type]
    return blueprint
