"""What an application may not do, and what it is told."""

from __future__ import annotations

import pytest
from flask import request

from flask_idempotency import ConfigurationError, NotAtomic, idempotent


def test_with_uncommitted_work_in_the_session_both_would_share_is_refused(world):
    @world.app.post("/inner")
    @idempotent
    def inner():
        return {}

    @world.app.post("/outer")
    @idempotent
    def outer():
        world.db.session.add(world.Payment(amount=1))
        world.db.session.flush()
        world.post("/inner")
        return {}

    world.app.testing = True
    with pytest.raises(NotAtomic, match="its own application"):
        world.post("/outer")
    assert world.count() == 0


def test_a_bind_that_is_not_there_is_named(world):
    world.app.post("/payments", endpoint="pay")(idempotent(other_binds=["logs"])(dict))
    world.app.testing = True
    with pytest.raises(ConfigurationError, match=r"'logs'.*\[None\]"):
        world.post()


def test_a_form_that_was_parsed_too_early_is_not_taken_for_an_empty_one(world):
    """The decorator above hides the view, so that the body cannot be read in time."""

    @world.app.before_request
    def csrf():
        request.form.get("token")

    def hiding():
        return idempotent(dict)()

    world.app.add_url_rule("/payments", "pay", hiding, methods=["POST"])
    world.app.testing = True
    with pytest.raises(ConfigurationError, match=r"functools\.wraps"):
        world.post(data={"amount": "5"})
