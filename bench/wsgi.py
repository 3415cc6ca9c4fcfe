"""What gunicorn serves: the measured application, made as its environment says."""

from __future__ import annotations

import json
import os

from flask import Flask

from .app import make_client


def create_app() -> Flask:
    """An application with a page for whoever waits until it answers."""
    given = os.environ
    client = make_client(
        given["DATABASE_URL"],
        redis_url=given.get("REDIS_URL"),
        protect=given["PROTECT"] == "yes",
        engine_options=json.loads(given["ENGINE_OPTIONS"]),
    )
    client.application.add_url_rule("/", endpoint="ready", view_func=lambda: "ready")
    return client.application
