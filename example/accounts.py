"""Who is calling: a bearer token (RFC 6750) for the API, a session cookie for the pages."""

import hashlib
import re
from typing import TypeVar

from flask import Blueprint, Request, abort, flash, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue
from flask_login import current_user, login_required, login_user, logout_user
from flask_wtf import FlaskForm
from sqlalchemy import select
from werkzeug.datastructures import WWWAuthenticate
from werkzeug.security import check_password_hash
from wtforms import PasswordField, StringField
from wtforms.validators import InputRequired

from example.extensions import db, login_manager
from example.models import Account, Order, Payment

blueprint = Blueprint("accounts", __name__)
Bought = TypeVar("Bought", Payment, Order)

LATEST = 20  # payments or orders in one list


def digest(token: str) -> bytes:
    """The stored form of a token. A plain hash is enough for a random token, not for a password."""
    return hashlib.sha256(token.encode()).digest()


@login_manager.request_loader
def by_token(asked: Request) -> Account | None:
    token = asked.authorization and asked.authorization.token
    return token and db.session.scalar(select(Account).where(Account.token_digest == digest(token)))


@login_manager.user_loader
def by_session(account_id: str) -> Account | None:
    """Never two accounts at once: with an ``Authorization`` header, the cookie counts for nothing."""
    return None if request.authorization else db.session.get(Account, int(account_id))


def require_token() -> None:
    """Only tokens enter the API. No other site makes a browser send one, so it needs no CSRF token."""
    if request.authorization is None or not current_user.is_authenticated:
        abort(401, "Send a known token.", www_authenticate=WWWAuthenticate("bearer"))


def scope() -> str | None:
    """Whose idempotency key it is: the account's. None if nobody is signed in."""
    return current_user.get_id() if current_user.is_authenticated else None


@login_manager.unauthorized_handler
def ask_to_sign_in() -> ResponseReturnValue:
    """A page leads to the sign-in. A form stays where it is: a redirect would lose it, and its key."""
    if request.method == "GET":
        return redirect(url_for("accounts.login", next=request.path))
    abort(401, "You are signed out. Sign in in another tab first.")


def latest(model: type[Bought]) -> list[Bought]:
    """The caller's newest payments or orders."""
    mine = select(model).where(model.account_id == current_user.id)
    return list(db.session.scalars(mine.order_by(model.id.desc()).limit(LATEST)))


def one_of_mine(model: type[Bought], number: int) -> Bought:
    """One of the caller's payments or orders; 404 for anybody else's."""
    row = db.session.get(model, number)
    return row if row and row.account_id == current_user.id else abort(404, "You have none like that.")


class LoginForm(FlaskForm):
    name = StringField("Name", [InputRequired()])
    password = PasswordField("Password", [InputRequired()])


@blueprint.route("/login", methods=["GET", "POST"])
def login() -> ResponseReturnValue:
    form = LoginForm()
    if form.validate_on_submit():
        account = db.session.scalar(select(Account).where(Account.name == form.name.data))
        if account and check_password_hash(account.password_hash, form.password.data or ""):
            login_user(account)
            asked_for = request.args.get("next", "")
            is_ours = re.match(r"/(?![/\\])", asked_for)  # not //elsewhere.example
            return redirect(asked_for if is_ours else url_for("accounts.show"), 303)
        flash("The name or the password is wrong.")
    return render_template("login.html", form=form), 200 if request.method == "GET" else 401


@blueprint.post("/logout")
def logout() -> ResponseReturnValue:
    logout_user()
    return redirect(url_for("products.index"), 303)


@blueprint.get("/account")
@login_required
def show() -> str:
    return render_template("account.html", payments=latest(Payment), orders=latest(Order))
