"""``/accounts/me``: the caller's own account."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, g

from example.auth import sign_in
from example.models import Account, db

blueprint = Blueprint("accounts", __name__)
blueprint.before_request(sign_in)


@blueprint.get("/accounts/me")
def show() -> dict[str, Any]:
    return db.get_or_404(Account, g.account_id).to_dict()
