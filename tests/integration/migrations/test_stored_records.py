"""Records that earlier releases have stored are read for ever.

The two files of SQL hold rows as :func:`store_all` wrote them, in the release that their first lines
name. They are never edited: a release that stores something in a new way adds rows of its own. A table
may have more columns and indexes than ours: an application's, or those of a release that was tried.
"""

from pathlib import Path

import pytest
from flask import Response

from flask_idempotency import current_operation, idempotent
from tests.integration.commands.running import runner
from tests.killed import Killed

KEYS = [b"0123456789abcdef0123456789abcdef"]
WIDER = """
ALTER TABLE idempotency_record ADD later JSON;
CREATE INDEX ix_idempotency_record_later ON idempotency_record (created_at) WHERE later IS NOT NULL;
"""


def add_views(world):
    """Views of all kinds; gives the list of what they have done."""
    done = []

    @world.app.post("/json")
    @idempotent(name="json", fingerprint="json")
    def pay():
        done.append("json")
        return {"id": 1}, 201

    @world.app.post("/bytes")
    @idempotent(name="bytes", fingerprint=["/amount"], namespace="v2")
    def draw():
        done.append("bytes")
        return Response(b"\x00\xff", 200, [("Content-Type", "image/x"), ("X-Two", "a"), ("X-Two", "b")])

    @world.app.post("/failed")
    @idempotent(name="failed", atomic=False)
    def fail():
        done.append("failed")
        return {"failed": True}, 500

    def call():
        step = current_operation.step("step", lambda: done.append("step") or {"ü": [1, None]})
        if current_operation.attempt == 1:
            raise Killed
        return {"step": step, "attempt": current_operation.attempt}, 201

    view = idempotent(name="interrupted", atomic=False, on_interrupted="retry")(call)
    world.app.add_url_rule("/interrupted", "interrupted", view, methods=["POST"])
    return done


def store_all(world):
    """What wrote the rows."""
    add_views(world)
    for path in "json", "bytes", "failed":
        world.post(f"/{path}", key=path)
    with pytest.raises(Killed):
        world.post("/interrupted", key="interrupted")


@pytest.mark.parametrize(
    ("rows", "added", "config"),
    [
        ("records.sql", "", {}),
        ("records_sealed.sql", "", {"IDEMPOTENCY_ENCRYPTION_KEYS": KEYS}),
        ("records.sql", WIDER, {}),
    ],
    ids=["plain", "sealed", "a wider table"],
)
def test_what_an_earlier_release_has_stored_is_replayed_and_continued(
    make_world, probing_at_once, rows, added, config
):
    world = make_world(PROPAGATE_EXCEPTIONS=False, **config)
    world.sql(Path(__file__).with_name(rows).read_text() + added)
    world.sql("update idempotency_record set created_at = now() - interval '2 hours',"
              " lease_expires_at = now() - interval '1 hour'"
              " where lease_expires_at is not null")  # fmt: skip
    done = add_views(world)
    answer = world.post("/json", key="json")
    assert (answer.json, answer.headers["Idempotent-Replayed"]) == ({"id": 1}, "true")
    assert answer.content_type == "application/json"
    answer = world.post("/bytes", key="bytes")
    assert (answer.data, answer.headers.getlist("X-Two")) == (b"\x00\xff", ["a", "b"])
    # Not comparable: what is compared of a body is another thing since this release.
    assert world.post("/json", key="json", json={"amount": 6}).json == {"id": 1}
    assert world.post("/bytes", key="bytes", json={"amount": 6}).data == answer.data
    assert world.post("/failed", key="failed").json == {"failed": True}
    expected = {"step": {"ü": [1, None]}, "attempt": 2}
    assert world.post("/interrupted", key="interrupted").json == expected
    assert done == []
    run = runner(world.app)
    [(digits,)] = world.sql("select encode(key, 'hex') from idempotency_record where steps is not null")
    assert "step" in run("show", digits[:8]).output
    assert "advice" not in run("check").output
    assert run("create-table").output == "idempotency_record: nothing to do\n"
    world.sql("update idempotency_record set expires_at = created_at")
    assert world.post("/json", key="json").status_code == 201
    assert done == ["json"]
    assert run("purge").output == "3 expired records deleted\n"
