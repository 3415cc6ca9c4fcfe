"""``/``: a page to try it on."""

from __future__ import annotations

import uuid

from flask import Blueprint, render_template, request

from example.seed import ALICE
from example.tour import STEPS

blueprint = Blueprint("pages", __name__)


@blueprint.get("/")
def index() -> str:
    url = request.url_root.rstrip("/")
    key = str(uuid.uuid4())
    lines = [(step, step.curl(url, key)) for step in STEPS]
    return render_template("index.html", lines=lines, account=ALICE)
