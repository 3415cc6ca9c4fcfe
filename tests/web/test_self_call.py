"""A view that makes a request to its own application."""

from __future__ import annotations

import pytest

from flask_idempotency import NotAtomic, idempotent


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
